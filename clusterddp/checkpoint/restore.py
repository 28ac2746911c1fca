"""Restores a checkpoint on all ranks: rank 0 reads the file once, each host holds it once, its ranks load from there.

Reading, verifying, and passing on to the other hosts happen at the same time, portion by portion. Nobody loads anything
before all data is verified and has arrived everywhere.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from clusterddp.checkpoint import file_format
from clusterddp.checkpoint.content import unpacked
from clusterddp.checkpoint.file_format import Content, Head
from clusterddp.checkpoint.memory.anonymous import free_memory
from clusterddp.checkpoint.memory.blocks import Blocks
from clusterddp.checkpoint.memory.host_memory import HostMemory, too_little
from clusterddp.checkpoint.state import unpack
from clusterddp.checkpoint.store import Checkpoint, Checkpoints
from clusterddp.distributed.collectives import PORTION, all_gather_numbers, broadcast_json, gather_numbers
from clusterddp.distributed.hosts import Hosts
from clusterddp.errors import CheckpointError
from clusterddp.reporter import say

#: A checkpoint: the attempt that wrote it, and its step.
Place = tuple[int, int]
OnDamaged = Callable[[Checkpoint, str], None]
#: Gets the plain values of a checkpoint's ``progress``, and its step.
OnFound = Callable[[Mapping[str, Any], int], None]


def restore(
    checkpoints: Checkpoints | None,
    device: torch.device,
    on_damaged: OnDamaged = lambda *_: None,
    on_found: OnFound = lambda *_: None,
    *,
    through: torch.device | None = None,
) -> tuple[Any, Place] | None:
    """The state of the newest undamaged checkpoint, with tensors on the CPU, and its place; None if there is none.

    The tensors lie in memory that the ranks of a host share: load copies of them, and keep none.

    Collective if there is a process group: only rank 0 has ``checkpoints``; it reads the file and sends the content to
    the other hosts ``through`` a device. The ranks agree by collectives on ``device``, which is also the default for
    the content. Raises CheckpointError on all ranks if there are checkpoints but all are damaged.

    All ranks call ``on_found`` when a checkpoint's head is verified, before any thread reads its tensors; again for an
    older checkpoint if these are damaged.
    """
    search, alone = _Search(checkpoints, on_damaged), not dist.is_initialized() or dist.get_world_size() == 1
    while True:
        found = search.next()
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
        on_found(_plain(state), place[1])
        if alone:
            data, damage = _read(_Source(found), entries, size)
        else:
            data, damage = _fetched(_Source(found), memory or HostMemory.open(size, offered), device, through or device)
        if damage is None:
            return unpacked(Content(entries, facts, state, data)), (place[0], place[1])
        search.report(damage)


def _plain(state: Any) -> dict[str, Any]:
    """The entries of a checkpoint's ``progress`` that contain no tensors."""
    found = {}
    for name, value in (state.get("progress", {}) if isinstance(state, dict) else {}).items():
        with suppress(LookupError, TypeError, ValueError, AttributeError, RecursionError):
            found[name] = unpack(value, {})
    return found


class _Search:
    """On rank 0, the candidates whose head is whole, newest first; damaged ones are reported. None on other ranks."""

    def __init__(self, checkpoints: Checkpoints | None, on_damaged: OnDamaged) -> None:
        self._checkpoints, self._on_damaged = checkpoints, on_damaged
        self._candidates = iter(checkpoints.candidates() if checkpoints is not None else [])
        self._current: Checkpoint | None = None
        self._reasons: list[str] = []
        #: Why there is no checkpoint to restore, although the run has some.
        self.failure: str | None = None

    def next(self) -> tuple[Checkpoint, Head] | None:
        """The next candidate."""
        for candidate in self._candidates:
            self._current = candidate
            try:
                return candidate, candidate.read_head()
            except CheckpointError as error:
                self.report(str(error))
        if self._checkpoints is not None:
            self.failure = self._failure(self._checkpoints)
        return None

    def report(self, reason: str) -> None:
        """The current candidate is damaged."""
        if self._current is not None:
            say(f"{reason}; trying the previous checkpoint")
            self._on_damaged(self._current, reason)
            self._reasons.append(reason)

    def _failure(self, checkpoints: Checkpoints) -> str | None:
        if self._reasons:
            return (
                "no checkpoint of this run can be read, and it never restarts from step 0 on its own:\n  "
                + "\n  ".join(self._reasons)
                + f"\ncopy an intact one into {checkpoints.folder}, or start a new run in another run directory"
            )
        try:
            checkpoints.check_present()
        except CheckpointError as error:
            return str(error)
        return None


class _Source:
    """On rank 0, the data of the file that was found, read and verified up to some place; nothing on other ranks."""

    def __init__(self, found: tuple[Checkpoint, Head] | None) -> None:
        self._found = found
        self._reading: Iterator[int] = iter(())
        self._verified = 0
        #: What is wrong with the data, as far as it was read.
        self.damage: str | None = None

    def read_into(self, into: file_format.Into) -> None:
        """Where the data belongs."""
        if self._found is not None:
            checkpoint, head = self._found
            self._reading = checkpoint.read_data(head, into)

    def read_up_to(self, stop: int) -> None:
        """Continues until so many bytes are verified, or damage is found."""
        try:
            while self._found is not None and self._verified < stop and self.damage is None:
                self._verified = next(self._reading)
        except CheckpointError as error:
            self.damage = str(error)


def _read(source: _Source, entries: Mapping[str, Any], size: int) -> tuple[mmap.mmap | Blocks, str | None]:
    """The data, on a rank that is alone: its parts may keep what lies in a separate block."""
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

    On one host, two small collectives: for a small state, each takes as long as a part of the reading. Rank 0 reads the
    first portion while the others come to the first one.
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
    """Sends the data to the other leaders while it is read; returns how it is damaged, if it is. Collective."""
    with _Relay(memory, hosts, through) as relay:
        for start in range(0, memory.size, PORTION):
            stop = min(start + PORTION, memory.size)
            source.read_up_to(stop)
            relay.send(start, stop)
    all_gather_numbers([0], device)  # All data has arrived on all hosts.
    (damage,) = broadcast_json([source.damage], device)
    return damage  # type: ignore[no-any-return]


class _Relay:
    """Passes data on from rank 0 to the first ranks of the other hosts; it does nothing if there is one host."""

    def __init__(self, memory: HostMemory, hosts: Hosts, device: torch.device) -> None:
        self._memory, self._hosts, self._device = memory, hosts, device
        self._group: Any = None
        leaders = self._hosts.leaders
        # NCCL would have to connect another group: all ranks take part, and the others drop what they get.
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
