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
from clusterddp.distributed.hosts import Hosts
from clusterddp.errors import CheckpointError
from clusterddp.reporter import say


class HostMemory:
    """``size`` bytes. ``into`` is what a leader fills, and ``data`` what each rank reads once that is done.

    The ranks of a host share a file without a name, which ends with them, however they end. Each maps it privately: a
    tensor that keeps pointing there is no other rank's, and writing to it changes nothing for others.
    """

    def __init__(self, size: int, hosts: Hosts, file: int | None) -> None:
        self.size, self.hosts = size, hosts
        self._file = file
        self.data: mmap.mmap
        if file is None:
            self.data = file_format.memory(size)
        else:
            self.data = mmap.mmap(file, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)

    @classmethod
    def allocate(cls, size: int, hosts: Hosts, device: torch.device) -> HostMemory:
        """Collective. Where the ranks of a host cannot share memory, each rank gets its own, and is its own leader.

        Raises CheckpointError on all ranks if a host has too little memory.
        """
        shares = size > 0 and len(hosts.leaders) < len(hosts.leader_of)
        check_free(all_gather_numbers([free_memory()], device), size, hosts.leaders)
        if not shares:
            return cls(size, hosts, None)
        file = _create(size) if hosts.is_leader else None
        told = all_gather_numbers([-1, 0] if file is None else [file, os.fstat(file).st_ino], device)
        if not hosts.is_leader:
            file = _open(hosts.pid_of[hosts.leader], *told[hosts.leader])
        found = all_gather_numbers([int(file is not None)], device)
        if all(one for (one,) in found):
            return cls(size, hosts, file)
        if file is not None:
            os.close(file)
        return cls(size, hosts.apart(), None)

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
            os.close(self._file)
            self._file = None


def check_free(found: Sequence[Sequence[int]], size: int, leaders: Sequence[int]) -> None:
    """Raises CheckpointError if a leader's host has less than ``size`` bytes; ``found``: what each rank's has."""
    for leader in leaders:
        (free,) = found[leader]
        if free < size:
            raise CheckpointError(
                f"restoring the checkpoint needs {size / 2**30:.1f} GiB of memory on each node, but "
                f"{free / 2**30:.1f} GiB are free on the node of rank {leader}: request more (--mem), or use fewer "
                "ranks or loader workers per node"
            )


def _create(size: int) -> int | None:
    """A file for this size; None, with a message, if there is no place for it."""
    try:
        file, _ = anonymous_file("the shared copy of the checkpoint", size)
    except CheckpointError as error:
        _say_apart(str(error))
        return None
    os.ftruncate(file, size)
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
