"""Restores a checkpoint on all ranks: rank 0 reads the file once, each host holds it once, its ranks load from there.

Reading, verifying, and passing on to the other hosts happen at the same time, portion by portion. Ranks load only once
all data is verified and has arrived everywhere.

Each host has the memory for a checkpoint's data once: the host's first rank fills it, all its ranks map it.

``CheckpointFolder`` saves and restores without a run directory: for a custom training loop under any launcher, or none.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from numbers import Integral
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from clusterddp import protocol
from clusterddp.checkpoint import file_format
from clusterddp.checkpoint.checkpoint import Checkpoint
from clusterddp.checkpoint.client import CheckpointClient, NotSaved, Saved
from clusterddp.checkpoint.file_format import Content, Head
from clusterddp.checkpoint.host_memory import Blocks, anonymous_file, free_memory
from clusterddp.checkpoint.parts import Stateful, check_parts
from clusterddp.checkpoint.sharded.folder import ShardedCheckpoint
from clusterddp.checkpoint.state_dict import load_state, recast_parameters, state_of
from clusterddp.checkpoint.store import Checkpoints
from clusterddp.checkpoint.transfer import unpacked
from clusterddp.distributed.bucket_order import PARTS_KEY, orders_in, settle_in
from clusterddp.distributed.collectives import (
    PORTION,
    Hosts,
    all_gather_numbers,
    broadcast_json,
    gather_numbers,
    own_facts,
)
from clusterddp.distributed.process_group import backend_of
from clusterddp.errors import CheckpointError
from clusterddp.jobdef.job import Keep
from clusterddp.process import at_exit, cancel_at_exit
from clusterddp.reporter import say
from clusterddp.rundir.files import hold
from clusterddp.rundir.run_directory import RunDirectory


class HostMemory:
    """``size`` bytes. A leader fills ``into``, and then each rank reads ``data``.

    The ranks of a host share a file without a name, which ends with them, however they end. Each maps it privately, so
    that writing to a tensor that points there has no effect on other ranks.
    """

    def __init__(self, size: int, file: int | None = None, created: bool = False) -> None:
        self.size = size
        self._file, self._created = file, created
        self._data: mmap.mmap | None = None

    @classmethod
    def create(cls, size: int) -> HostMemory:
        """On a leader. If no file can be made, prints a message and uses memory for this rank alone."""
        return cls(size, _create(size), created=True)

    @classmethod
    def open(cls, size: int, address: Sequence[int]) -> HostMemory:
        """On a rank other than the leader: the leader's memory, if it is on this host and can be opened."""
        host, pid, number, inode = address
        return cls(size, open_memory(pid, number, inode) if host == own_facts()[0] else None)

    @property
    def address(self) -> list[int]:
        """Where other ranks of the host find the file: host, process id, descriptor and inode."""
        place = [-1, 0] if self._file is None else [self._file, os.fstat(self._file).st_ino]
        return [*own_facts(), *place]

    @property
    def facts(self) -> list[int]:
        """This rank's facts for rank 0: ``own_facts``, the host's free memory, and whether it has the file."""
        return [*own_facts(), free_memory(), int(self._file is not None)]

    def spread(self, hosts: Hosts, device: torch.device) -> tuple[HostMemory, Hosts]:
        """The same on all hosts, once rank 0's has it. Collective.

        If the ranks of a host cannot share memory, each rank gets its own, and is its own leader.
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
        """The memory as this rank sees it, mapped by the first call."""
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
        """The target of ``file_format.read_data``: the file, which needs no page faults, or the memory."""
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
        """Closes the file. Its mapping stays until no tensor needs it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def too_little(free: Sequence[int], size: int, leaders: Sequence[int]) -> str | None:
    """The message if a leader's host has less than ``size`` bytes. ``free``: the bytes of each rank's host."""
    for leader in leaders:
        if free[leader] < size:
            return (
                f"restoring the checkpoint needs {size / 2**30:.1f} GiB of memory on each node, but "
                f"{free[leader] / 2**30:.1f} GiB are free on the node of rank {leader}. Request more (--mem), or use "
                "fewer ranks or loader workers per node"
            )
    return None


def _create(size: int) -> int | None:
    """A file for this size. Returns None, with a message, if there is no place for it."""
    try:
        file, _ = anonymous_file("the shared copy of the checkpoint", size)
    except CheckpointError as error:
        _say_apart(str(error))
        return None
    os.ftruncate(file, max(size, 1))
    return file


def open_memory(pid: int, number: int, inode: int) -> int | None:
    """The file of another process. None, with a message, if it cannot be opened."""
    if number < 0:
        return None
    file, reason = None, "its descriptor is now a different file"
    try:
        file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
        if os.fstat(file).st_ino == inode:
            return file
    except OSError as error:
        reason = error.strerror or str(error)
    if file is not None:
        with suppress(OSError):
            os.close(file)
    _say_apart(f"could not open the memory of process {pid} ({reason})")
    return None


def _say_apart(reason: str) -> None:
    say(f"{reason}. Each rank of {socket.gethostname()} holds the whole checkpoint while it is restored")


#: A checkpoint: the attempt that wrote it, and its step.
Place = tuple[int, int]
OnDamaged = Callable[[Checkpoint, str], None]


def restore(
    checkpoints: Checkpoints | None,
    device: torch.device,
    on_damaged: OnDamaged = lambda *_: None,
    *,
    through: torch.device | None = None,
) -> tuple[Any, Place] | None:
    """The state of the newest undamaged checkpoint, with tensors on the CPU, and its place. None if there is none.

    The tensors are in memory that the ranks of a host share, so load copies of them, and keep none.

    Collective if there is a process group. Only rank 0 has ``checkpoints``. It reads the file and sends the content to
    the other hosts ``through`` a device. The ranks agree by collectives on ``device``, which is also the default for
    the content. Raises CheckpointError on all ranks if there are checkpoints but all are damaged.
    """
    search, alone = Search(checkpoints, on_damaged), not dist.is_initialized() or dist.get_world_size() == 1
    while True:
        found = search.next(Checkpoint, Checkpoint.read_head)
        described = found and (found[1].entries, found[1].facts, found[1].state, found[1].size)
        place = found and (found[0].attempt, found[0].step)
        memory = None if found is None or alone else HostMemory.create(found[1].size)
        offered = memory and memory.address
        reason, place, described, offered = broadcast_json([search.failure, place, described, offered], device)
        if reason is not None:
            raise CheckpointError(reason)
        if described is None:
            return None
        entries, facts, state, size = described
        if alone:
            data, damage = _read(_Source(found), entries, size)
        else:
            data, damage = _fetched(_Source(found), memory or HostMemory.open(size, offered), device, through or device)
        if damage is None:
            return unpacked(Content(entries, facts, state, data)), (place[0], place[1])
        search.report(damage)


def newest_progress(checkpoints: Checkpoints) -> Mapping[str, Any] | None:
    """The progress in the checkpoint that ``restore`` will take unless its data is damaged. None if there is none."""
    for candidate in _candidates(checkpoints):
        with suppress(CheckpointError):  # restore reports it
            progress: Mapping[str, Any] = candidate.read_head().state.get("progress", {})
            return progress
    return None


def _candidates(checkpoints: Checkpoints) -> list[Checkpoint]:
    if step := os.environ.get(protocol.COMMITTED):
        checkpoints.await_committed(int(step))
    return checkpoints.candidates()


_Kind = TypeVar("_Kind", bound=Checkpoint)
_Found = TypeVar("_Found")
_BRIDGE = (
    "or start a new run from its weights, with `clusterddp export RUN model.safetensors` and "
    'ctx.run(init_from="model.safetensors")'
)
#: For each kind of checkpoint that the run's parts need: why one of the other kind does not fit.
_OTHER_KIND: Mapping[type[Checkpoint], str] = {
    Checkpoint: (
        "a sharded model, but ctx.run() received a model that fully_shard has not sharded. Shard it as before, "
        f"{_BRIDGE}"
    ),
    ShardedCheckpoint: (
        f"a model that was not sharded, but ctx.run() received a sharded one. Pass it without fully_shard, {_BRIDGE}"
    ),
}


class Search:
    """On rank 0, the candidates with a whole head, newest first. Damaged ones are reported. Empty on other ranks."""

    def __init__(self, checkpoints: Checkpoints | None, on_damaged: OnDamaged) -> None:
        self._checkpoints, self._on_damaged = checkpoints, on_damaged
        self._candidates = iter(_candidates(checkpoints) if checkpoints is not None else [])
        self._current: Checkpoint | None = None
        self._reasons: list[str] = []
        #: Why there is no checkpoint to restore, although the run has some.
        self.failure: str | None = None

    def next(self, kind: type[_Kind], read: Callable[[_Kind], _Found]) -> tuple[_Kind, _Found] | None:
        """The next candidate, with what ``read`` returns for it. None if a candidate is not of this kind."""
        for candidate in self._candidates:
            self._current = candidate
            if type(candidate) is not kind:
                self.failure = f"checkpoint {candidate.step} of this run is that of {_OTHER_KIND[kind]}"
                return None
            try:
                return candidate, read(candidate)
            except CheckpointError as error:
                self.report(str(error))
        if self._checkpoints is not None:
            self.failure = self._failure(self._checkpoints)
        return None

    def report(self, reason: str) -> None:
        """The current candidate is damaged."""
        if self._current is not None:
            say(f"{reason}. Trying the previous checkpoint")
            self._on_damaged(self._current, reason)
            self._reasons.append(reason)

    def _failure(self, checkpoints: Checkpoints) -> str | None:
        if self._reasons:
            return (
                "no checkpoint of this run can be read. The run never restarts from step 0 on its own:\n  "
                + "\n  ".join(self._reasons)
                + f"\nCopy an intact one into {checkpoints.folder}, or start a new run in a different run directory"
            )
        try:
            checkpoints.check_present()
        except CheckpointError as error:
            return str(error)
        return None


class _Source:
    """On rank 0, the data of the found file, read and verified up to some place. Empty on other ranks."""

    def __init__(self, found: tuple[Checkpoint, Head] | None) -> None:
        self._newest = found
        self._reading: Iterator[int] = iter(())
        self._verified = 0
        #: The damage in the data that was read so far.
        self.damage: str | None = None

    def read_into(self, into: file_format.Into) -> None:
        """Sets the target of the data."""
        if self._newest is not None:
            checkpoint, head = self._newest
            self._reading = checkpoint.read_data(head, into)

    def read_up_to(self, stop: int) -> None:
        """Continues until this many bytes are verified, or damage is found."""
        try:
            while self._newest is not None and self._verified < stop and self.damage is None:
                self._verified = next(self._reading)
        except CheckpointError as error:
            self.damage = str(error)


def _read(source: _Source, entries: Mapping[str, Any], size: int) -> tuple[mmap.mmap | Blocks, str | None]:
    """The data, on a single rank, whose parts may keep tensors in separate blocks."""
    if (failure := too_little([free_memory()], size, [0])) is not None:
        raise CheckpointError(failure)
    spans = ((start, stop) for start, stop in (entry["data_offsets"] for entry in entries.values()))
    data = Blocks(spans, size, file_format.memory)
    source.read_into(data)
    source.read_up_to(size)
    return data, source.damage


def _fetched(
    source: _Source, memory: HostMemory, device: torch.device, through: torch.device
) -> tuple[mmap.mmap, str | None]:
    """The data on every rank, and how it is damaged, if it is.

    On one host, makes two small collectives. For a small state, each takes as long as a part of the reading. Rank 0
    reads the first portion while the others reach the first collective.
    """
    try:
        if dist.get_rank() == 0:
            source.read_into(memory.into)
            source.read_up_to(min(PORTION, memory.size))
        facts = gather_numbers(memory.facts, device)
        failure, ranks, damage = broadcast_json(_conclusion(source, memory, facts), device)
        if failure is not None:
            raise CheckpointError(failure)
        if ranks is not None:
            memory, hosts = memory.spread(Hosts.of(ranks, dist.get_rank()), device)
            damage = _passed_on(source, memory, hosts, device, through)
        return memory.data, damage
    finally:
        memory.close()


def _conclusion(source: _Source, memory: HostMemory, facts: list[list[int]] | None) -> list[Any]:
    """Rank 0's answer to all ranks: why they cannot restore, else their facts if some need the data sent, else damage.

    Reads all data if rank 0's host is the only one.
    """
    if facts is None:
        return []
    ranks = [one[:2] for one in facts]
    hosts = Hosts.of(ranks, 0)
    failure = too_little([one[2] for one in facts], memory.size, hosts.leaders)
    if failure is not None or not all(one[3] for one in facts):
        return [failure, ranks, None]
    source.read_up_to(memory.size)
    return [None, None, source.damage]


def _passed_on(
    source: _Source, memory: HostMemory, hosts: Hosts, device: torch.device, through: torch.device
) -> str | None:
    """Sends the data to the other leaders while it is read. Returns how it is damaged, if it is. Collective."""
    with _Relay(memory, hosts, through) as relay:
        for start in range(0, memory.size, PORTION):
            stop = min(start + PORTION, memory.size)
            source.read_up_to(stop)
            relay.send(start, stop)
    all_gather_numbers([0], device)  # All data has arrived on all hosts.
    (damage,) = broadcast_json([source.damage], device)
    return damage  # type: ignore[no-any-return]


class _Relay:
    """Passes data on from rank 0 to the first ranks of the other hosts. Has no effect with one host."""

    def __init__(self, memory: HostMemory, hosts: Hosts, device: torch.device) -> None:
        self._memory, self._hosts, self._device = memory, hosts, device
        self._group: Any = None
        leaders = self._hosts.leaders
        # NCCL would have to connect a second group, so all ranks take part, and the others drop the data.
        self._all = len(leaders) == len(self._hosts.leader_of) or device.type != "cpu"

    def __enter__(self) -> _Relay:
        if len(self._hosts.leaders) > 1:
            self._group = dist.group.WORLD if self._all else dist.new_group(self._hosts.leaders)
        return self

    def send(self, start: int, stop: int) -> None:
        """Collective of the hosts' first ranks."""
        if self._group is None or not (self._all or self._hosts.is_leader):
            return
        if self._hosts.rank == 0:
            portion = self._memory.view(start, stop - start).to(self._device)
        else:
            portion = torch.empty(stop - start, dtype=torch.uint8, device=self._device)
        dist.broadcast(portion, src=0, group=self._group)
        if self._hosts.is_leader and self._hosts.rank != 0:
            self._memory.put(portion, start)

    def __exit__(self, *_: object) -> None:
        if self._group is not None and not self._all and self._hosts.is_leader:
            dist.destroy_process_group(self._group)


class CheckpointFolder:
    """Saves and restores named parts in a folder, without a run: for a custom training loop under any launcher.

    A part is anything with ``state_dict()`` and ``load_state_dict()``. Create one CheckpointFolder on every rank, after
    the process group if there is one. Only rank 0 reads and writes. A process that creates one on the same folder later
    supersedes it, and the older one can no longer save. Use as a context manager, or call ``close()``.

    Args:
        path: the folder. Created if it does not exist.
        keep: the number of newest checkpoints to keep, or a ``Keep``.

    Raises:
        RunDirectoryError: the folder's ``private`` belongs to another user.
    """

    def __init__(self, path: str | os.PathLike[str], *, keep: int | Keep = 3) -> None:
        directory = RunDirectory(path)
        only_nccl = dist.is_initialized() and not backend_of(dist.get_backend_config(), "cpu")
        self._device = torch.device("cuda", torch.cuda.current_device()) if only_nccl else torch.device("cpu")
        self._checkpoints: Checkpoints | None = None
        self._restored = False
        #: The step of the checkpoint that this process has restored or saved last.
        self._newest: int | None = None
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        directory.create()
        hold(directory.path)
        keep = Keep(keep) if isinstance(keep, int) else keep
        attempt = directory.create_attempt()
        self._checkpoints = Checkpoints(directory, attempt, keep)
        gpu = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        self._checkpoint_client = CheckpointClient(directory, attempt, keep, gpu)
        at_exit(self.close)

    def restore(self, **parts: Stateful) -> int:
        """Loads the newest undamaged checkpoint into the parts. Collective: call it on all ranks, before ``save``.

        Args:
            parts: what to load, by the names given to ``save``.

        Returns:
            The checkpoint's step, which is the number of completed steps. 0 if there is no checkpoint.

        Raises:
            TypeError: a part has no ``load_state_dict()``.
            CheckpointError: on all ranks, if all checkpoints are damaged or the newest one lacks a part.
        """
        check_parts("restore", parts)
        restored = restore(self._checkpoints, self._device)
        if self._checkpoints is not None and not self._restored:  # a later call may load this process's own checkpoint
            self._restored = True
            self._checkpoints.record_resume(None if restored is None else restored[1])
        if restored is None:
            return 0
        content, (_, step) = restored
        self._newest = step
        if missing := parts.keys() - content.keys():
            saved = ", ".join(name for name in content if name != PARTS_KEY)
            raise CheckpointError(f"checkpoint {step} lacks {', '.join(sorted(missing))}. It has {saved}")
        recast = recast_parameters(parts, content)
        for name, part in parts.items():
            load_state(part, content[name], recast)
        settle_in(parts, content)
        return step

    def save(self, step: int, **parts: Stateful) -> None:
        """Saves the parts: rank 0 copies their state and returns, and the copy is written in the background.

        Waits for the previous save first. Other ranks return at once.

        Args:
            step: the number of completed steps, 0 or more.
            parts: what to save, by name.

        Raises:
            TypeError: a part has no ``state_dict()``.
            ValueError: ``step`` is not an integer of at least 0, or is smaller than that of the newest checkpoint.
            RuntimeError: ``restore()`` was not called.
            CheckpointError: the previous save failed, or the state cannot be saved.
            Superseded: a newer process uses the folder.
        """
        check_parts("save", parts)
        if not isinstance(step, Integral) or step < 0:
            raise ValueError(f"save({step!r}): expected the number of completed steps, an integer of at least 0")
        if self._checkpoints is not None:
            if not self._restored:
                raise RuntimeError("call restore() before save(), so that existing checkpoints are not ignored")
            self.wait()
            if self._newest is not None and step < self._newest:
                raise ValueError(
                    f"save({step}): the newest checkpoint has step {self._newest}, and restore() loads the largest "
                    f"step. Pass a step of at least {self._newest}, or use a different folder to start again"
                )
            states = {**{name: state_of(part) for name, part in parts.items()}, **orders_in(parts)}
            self._checkpoint_client.save(int(step), states, {}, urgent=False)

    def wait(self) -> Saved | None:
        """Waits until the last save is verified and durable.

        Returns:
            The save: its ``step``, the file's size in ``bytes``, when it was committed (``at``, monotonic clock, in
            seconds), and the steps of older checkpoints that a full disk has cost (``deleted``). None if no save was in
            progress.

        Raises:
            CheckpointError: the save failed. Earlier checkpoints are not affected.
            Superseded: a newer process uses the folder.
        """
        if self._checkpoints is None:
            return None
        try:
            saved = self._checkpoint_client.result(wait=True)
        except NotSaved as error:
            raise CheckpointError(f"step {error.step} was not saved: {error}") from error
        if saved is not None:
            self._newest = saved.step
        return saved

    def close(self) -> None:
        """Waits for the last save and ends the writer process. Raises the errors of ``wait()``."""
        cancel_at_exit(self.close)
        if self._checkpoints is not None:
            try:
                self.wait()
            finally:
                self._checkpoint_client.close()
                self._checkpoint_client.free()
                self._checkpoints = None

    def __enter__(self) -> CheckpointFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
