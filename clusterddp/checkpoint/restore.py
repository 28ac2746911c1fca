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
from clusterddp.checkpoint.memory.host_memory import HostMemory, check_free
from clusterddp.checkpoint.state import unpack
from clusterddp.checkpoint.store import Checkpoint, Checkpoints
from clusterddp.distributed.collectives import PORTION, all_gather_numbers, broadcast_json
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
) -> tuple[Any, Place] | None:
    """The state of the newest undamaged checkpoint, with tensors on the CPU, and its place; None if there is none.

    The tensors lie in memory that the ranks of a host share: load copies of them, and keep none.

    Collective if there is a process group: only rank 0 has ``checkpoints``; it reads the file and broadcasts the
    content through ``device``. Raises CheckpointError on all ranks if there are checkpoints but all are damaged.

    All ranks call ``on_found`` when a checkpoint's head is verified, before any thread reads its tensors; again for an
    older checkpoint if these are damaged.
    """
    search, hosts = _Search(checkpoints, on_damaged), None
    while True:
        found = search.next()
        described = found and (found[1].entries, found[1].facts, found[1].state, found[1].size)
        place = found and (found[0].attempt, found[0].step)
        reason, place, described = broadcast_json([search.failure, place, described], device)
        if reason is not None:
            raise CheckpointError(reason)
        if described is None:
            return None
        entries, facts, state, size = described
        on_found(_plain(state), place[1])
        hosts = hosts or Hosts.find(device)
        data, damage = _fetched(found, size, hosts, device) if len(hosts.leader_of) > 1 else _read(found)
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


def _read(found: tuple[Checkpoint, Head] | None) -> tuple[Blocks, str | None]:
    """The data, on a rank that is alone: its parts may keep what lies in a separate block."""
    assert found is not None
    checkpoint, head = found
    check_free([[free_memory()]], head.size, [0])
    spans = ((start, stop) for start, stop in (entry["data_offsets"] for entry in head.entries.values()))
    data = Blocks(spans, head.size, file_format.memory)
    return data, _read_up_to(head.size, checkpoint.read_data(head, data))


def _fetched(
    found: tuple[Checkpoint, Head] | None, size: int, hosts: Hosts, device: torch.device
) -> tuple[mmap.mmap, str | None]:
    """The data of the file that rank 0 has found, on every rank; and how it is damaged, if it is."""
    memory = HostMemory.allocate(size, hosts, device)
    damage: str | None = None
    try:
        reading = found[0].read_data(found[1], memory.into) if found is not None else iter(())
        with _Relay(memory, device) as relay:
            for start in range(0, size, PORTION):
                stop = min(start + PORTION, size)
                if damage is None:
                    damage = _read_up_to(stop, reading) if found is not None else None
                relay.send(start, stop)
        all_gather_numbers([0], device)  # All data has arrived on all hosts.
        (damage,) = broadcast_json([damage], device)
    finally:
        memory.close()
    return memory.data, damage


def _read_up_to(stop: int, reading: Iterator[int]) -> str | None:
    """Continues until so many bytes are verified; returns what is wrong with them."""
    try:
        for verified in reading:
            if verified >= stop:
                break
    except CheckpointError as error:
        return str(error)
    return None


class _Relay:
    """Passes data on from rank 0 to the first ranks of the other hosts; it does nothing if there is one host."""

    def __init__(self, memory: HostMemory, device: torch.device) -> None:
        self._memory, self._hosts, self._device = memory, memory.hosts, device
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
