"""Memory for a checkpoint's data, once per host: the host's first rank fills it, all its ranks map it."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Sequence
from contextlib import suppress

import torch

from clusterddp.checkpoint import file_format
from clusterddp.checkpoint.memory.anonymous import anonymous_file, free_memory
from clusterddp.distributed.collectives import all_gather_numbers
from clusterddp.distributed.hosts import Hosts, own_facts
from clusterddp.errors import CheckpointError
from clusterddp.reporter import say

#: The open files of this process.
_FILES: set[int] = set()


class HostMemory:
    """``size`` bytes. ``into`` is what a leader fills, and ``data`` what each rank reads once that is done.

    The ranks of a host share a file without a name, which ends with them, however they end. Each maps it privately: a
    tensor that keeps pointing there is no other rank's, and writing to it changes nothing for others.
    """

    def __init__(self, size: int, file: int | None = None, created: bool = False) -> None:
        self.size = size
        self._file, self._created = file, created
        self._data: mmap.mmap | None = None
        if file is not None:
            _FILES.add(file)

    @classmethod
    def create(cls, size: int) -> HostMemory:
        """On a leader; with memory for this rank alone, and a message, if no file can be made."""
        return cls(size, _create(size), created=True)

    @classmethod
    def open(cls, size: int, address: Sequence[int]) -> HostMemory:
        """On another rank: what a leader has created, if it is of this host and can be opened."""
        host, pid, number, inode = address
        return cls(size, _open(pid, number, inode) if host == own_facts()[0] else None)

    @property
    def address(self) -> list[int]:
        """Where other ranks of the host find the file: host, process id, descriptor and inode."""
        place = [-1, 0] if self._file is None else [self._file, os.fstat(self._file).st_ino]
        return [*own_facts(), *place]

    @property
    def facts(self) -> list[int]:
        """What rank 0 must know of this rank: ``own_facts``, the host's free memory, and whether it has the file."""
        return [*own_facts(), free_memory(), int(self._file is not None)]

    def spread(self, hosts: Hosts, device: torch.device) -> tuple[HostMemory, Hosts]:
        """The same on all hosts, once rank 0's has it. Collective.

        Where the ranks of a host cannot share memory, each rank gets its own, and is its own leader.
        """
        memory, shares = self, len(hosts.leaders) < len(hosts.leader_of)
        if shares and hosts.is_leader and hosts.rank != 0:
            memory = HostMemory.create(self.size)
        addresses = all_gather_numbers(memory.address, device)
        if hosts.leader not in (0, hosts.rank):
            memory = HostMemory.open(self.size, addresses[hosts.leader])
        found = all_gather_numbers([int(memory._file is not None)], device)
        if shares and all(one for (one,) in found):
            return memory, hosts
        if not memory._created:
            memory.close()
        return memory, hosts.apart()

    @property
    def data(self) -> mmap.mmap:
        """The memory as this rank sees it: mapped by the first call."""
        if self._data is not None:
            return self._data
        if self._file is None:
            self._data = file_format.memory(self.size)
        else:
            prot = mmap.PROT_READ | mmap.PROT_WRITE
            self._data = mmap.mmap(self._file, max(self.size, 1), flags=mmap.MAP_PRIVATE, prot=prot)
        return self._data

    @property
    def into(self) -> file_format.Into:
        """What ``file_format.read_data`` fills: the file, which needs no page faults, or the memory."""
        return memoryview(self.data)[: self.size] if self._file is None else self._file

    def put(self, portion: torch.Tensor, start: int) -> None:
        """Fills a part, on a leader."""
        if self._file is None:
            self.view(start, len(portion)).copy_(portion)
            return
        left = memoryview(portion.cpu().numpy().data)
        while left:
            count = os.pwrite(self._file, left, start)
            left, start = left[count:], start + count

    def view(self, start: int, count: int) -> torch.Tensor:
        """A part as a tensor of bytes, which shares the memory."""
        return torch.frombuffer(self.data, dtype=torch.uint8, offset=start, count=count)

    def close(self) -> None:
        """Closes the file; what is mapped stays until no tensor needs it."""
        if self._file is not None:
            _FILES.discard(self._file)
            os.close(self._file)
            self._file = None


def _close_all() -> None:
    for file in _FILES:
        os.close(file)
    _FILES.clear()


# A loader's workers, which start while a checkpoint is read, would keep its memory for as long as they live.
os.register_at_fork(after_in_child=_close_all)


def too_little(free: Sequence[int], size: int, leaders: Sequence[int]) -> str | None:
    """The message if a leader's host has less than ``size`` bytes; ``free``: what each rank's host has."""
    for leader in leaders:
        if free[leader] < size:
            return (
                f"restoring the checkpoint needs {size / 2**30:.1f} GiB of memory on each node, but "
                f"{free[leader] / 2**30:.1f} GiB are free on the node of rank {leader}: request more (--mem), or use "
                "fewer ranks or loader workers per node"
            )
    return None


def _create(size: int) -> int | None:
    """A file for this size; None, with a message, if there is no place for it."""
    try:
        file, _ = anonymous_file("the shared copy of the checkpoint", size)
    except CheckpointError as error:
        _say_apart(str(error))
        return None
    os.ftruncate(file, max(size, 1))
    return file


def _open(pid: int, number: int, inode: int) -> int | None:
    """The file of another process; None, with a message, if it cannot be opened."""
    if number < 0:
        return None
    file, reason = None, "another file is there"
    try:
        file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
        if os.fstat(file).st_ino == inode:
            return file
    except OSError as error:
        reason = error.strerror or str(error)
    if file is not None:
        with suppress(OSError):
            os.close(file)
    _say_apart(f"cannot open the memory of process {pid}: {reason}")
    return None


def _say_apart(reason: str) -> None:
    say(f"{reason}; each rank of {socket.gethostname()} holds the whole checkpoint while it is restored")
