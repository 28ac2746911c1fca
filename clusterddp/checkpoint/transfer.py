"""States that travel between ranks: gathered on rank 0, or sent from there to all, without pickle.

A state is sent as JSON, and its tensors as bytes in portions, so that a rank needs little more memory than the states
themselves. All functions are collective, and need no process group at one rank. The tensors of a state in a
checkpoint's content are views of the content's memory.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from clusterddp.checkpoint import file_format
from clusterddp.checkpoint.file_format import Content, Pieces
from clusterddp.checkpoint.host_memory import Blocks
from clusterddp.checkpoint.packing import TORCH_DTYPES, pack, tensor_facts, unpack
from clusterddp.checkpoint.state_copies import offer
from clusterddp.distributed.collectives import PORTION, all_gather_numbers, broadcast_bytes, broadcast_json
from clusterddp.errors import CheckpointError


def unpacked(content: Content) -> Any:
    """The nested state in a checkpoint's content. Its tensors share the content's memory. ``load_state`` copies.

    Raises CheckpointError if state and tensors do not match, so that clusterddp did not write the intact file.
    """
    try:
        tensors = {name: _tensor(entry, content.data) for name, entry in content.entries.items()}
        return unpack(content.state, tensors, mark=True)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, RecursionError) as error:
        raise CheckpointError(
            f"the state in the checkpoint of step {content.facts.get('step', '?')} does not match its tensors "
            f"({error!r:.200}). Another program wrote the file"
        ) from error


def _tensor(entry: dict[str, Any], data: mmap.mmap | Pieces) -> torch.Tensor:
    start, stop = entry["data_offsets"]
    dtype = TORCH_DTYPES[entry["dtype"]]
    if start == stop:
        return torch.empty(0, dtype=dtype).reshape(entry["shape"])
    alone = False
    if isinstance(data, Blocks):
        view, alone = data.bytes_of(start, stop)
    else:
        view = torch.frombuffer(data, dtype=torch.uint8, offset=start, count=stop - start)
    found = view.view(dtype).reshape(entry["shape"])
    if alone:
        offer(found)
    return found


#: The most bytes of the states of all ranks together, because they pass through rank 0's memory.
MOST_BYTES = 1 << 30


class TooLarge(Exception):
    """The states of all ranks take ``size`` bytes together, more than they may."""

    def __init__(self, size: int) -> None:
        super().__init__(f"{size} bytes")
        self.size = size


@dataclass(frozen=True)
class _Packed:
    """A state as bytes: its JSON, and its tensors' entries, as in a checkpoint, then all data."""

    described: bytearray
    data: mmap.mmap
    size: int

    @classmethod
    def of(cls, state: Any) -> _Packed:
        """Copies the state. Raises CheckpointError if it cannot be saved."""
        plain, tensors = pack(state)
        facts = tensor_facts(tensors)
        places, size = file_format.offsets(facts)
        data = file_format.memory(size)
        entries = {}
        for tensor, fact, start in zip(tensors.values(), facts, places, strict=True):
            stop = start + fact.nbytes
            entries[fact.name] = {"dtype": fact.dtype, "shape": fact.shape, "data_offsets": [start, stop]}
            if fact.nbytes:
                place = torch.frombuffer(data, dtype=torch.uint8, offset=start, count=fact.nbytes)
                place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return cls(bytearray(json.dumps([entries, plain]).encode()), data, size)

    def state(self) -> Any:
        """The inverse of ``of``. Its tensors share the memory."""
        entries, plain = json.loads(self.described)
        return unpacked(Content(entries, {}, plain, self.data))


def digest(state: Any) -> bytes:
    """Equal for equal states, practically never for others."""
    packed = _Packed.of(state)
    found = hashlib.blake2b(packed.described, digest_size=16)
    found.update(memoryview(packed.data)[: packed.size])
    return found.digest()


def gather(
    state: Any,
    device: torch.device,
    on_size: Callable[[int], None] = lambda _: None,
    most_bytes: int = MOST_BYTES,
) -> list[Any] | None:
    """The states of all ranks on rank 0, in rank order. None on the other ranks. Fast if all are empty.

    ``on_size`` gets the bytes that they take, unless all are empty. Raises, on all ranks and before they are sent,
    TooLarge, and CheckpointError if a rank's state cannot be saved.
    """
    own, all_sizes = _agreed(state, device)
    if not any(map(any, all_sizes)):
        return [{} for _ in all_sizes] if _is_first() else None
    if (total := sum(map(sum, all_sizes))) > most_bytes:
        raise TooLarge(total)
    on_size(total)
    described, data = (_gather_bytes(part, [size[at] for size in all_sizes], device) for at, part in enumerate(own))
    if described is None or data is None:
        return None
    parts = zip(described, data, all_sizes, strict=True)
    return [_Packed(bytearray(head), memory, size).state() if some else {} for head, memory, (some, size) in parts]


class Gathering:
    """Gathers states repeatedly. JSON or tensors that a rank has sent before are not sent again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        #: JSON and tensors, as this rank sent them last. On rank 0, those of all ranks.
        self._own: list[bytearray] = []
        self._all: list[list[Any]] = []

    def __call__(self, state: Any) -> list[Any] | None:
        """The states of all ranks on rank 0, in rank order. None on the other ranks.

        Raises CheckpointError on all ranks if a rank's state cannot be saved.
        """
        views, all_sizes = _agreed(state, self._device)
        own = [bytearray(view) for view in views]
        changed = [not self._own or new != self._own[part] for part, new in enumerate(own)]
        all_changed = all_gather_numbers([int(one) for one in changed], self._device)
        self._own, self._all = own, self._all or [[None, None] for _ in all_sizes]
        for part in range(2):
            sizes = [size[part] * flags[part] for size, flags in zip(all_sizes, all_changed, strict=True)]
            sent = memoryview(own[part]) if changed[part] else memoryview(b"")
            for rank, memory in enumerate(_gather_bytes(sent, sizes, self._device) or []):
                if all_changed[rank][part]:
                    self._all[rank][part] = memory
        if not _is_first():
            return None
        parts = zip(self._all, all_sizes, strict=True)
        return [_Packed(bytearray(head), memory, size).state() for (head, memory), (_, size) in parts]


def broadcast(state: Any, failure: str | None, device: torch.device) -> Any:
    """Rank 0's state on every rank. Raises CheckpointError with ``failure`` on all ranks if rank 0 has one."""
    packed = None
    if failure is None and _is_first():
        try:
            packed = _Packed.of(state)
        except CheckpointError as error:
            failure = str(error)
    failure, told = broadcast_json([failure, packed and [packed.described.decode(), packed.size]], device)
    if failure is not None:
        raise CheckpointError(failure)
    described, size = told
    packed = packed or _Packed(bytearray(described.encode()), file_format.memory(size), size)
    broadcast_bytes(packed.data, size, device)
    return packed.state()


def _agreed(state: Any, device: torch.device) -> tuple[list[memoryview], list[list[int]]]:
    """This rank's JSON and data, which are empty for an empty state, and their sizes on all ranks.

    Raises CheckpointError on all ranks if a rank's state cannot be saved.
    """
    failure: CheckpointError | None = None
    own: list[memoryview] = []
    try:
        packed = _Packed.of(state)
        own = [memoryview(packed.described), memoryview(packed.data)[: packed.size]]
        sizes = [len(view) for view in own] if state else [0, 0]
    except CheckpointError as error:
        failure, sizes = error, [-1, -1]
    all_sizes = all_gather_numbers(sizes, device)
    if failure is not None:
        raise failure
    if [-1, -1] in all_sizes:
        raise CheckpointError(f"the state of rank {all_sizes.index([-1, -1])} cannot be saved. See its log")
    return [view[:size] for view, size in zip(own, sizes, strict=True)], all_sizes


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _gather_bytes(own: memoryview, sizes: list[int], device: torch.device) -> list[mmap.mmap] | None:
    """Each rank's bytes, on rank 0. All ranks send a portion at a time, padded to the longest."""
    found = [file_format.memory(size) for size in sizes] if _is_first() else None
    if found is not None:
        found[0][: len(own)] = own
    if len(sizes) == 1:
        return found
    mine = torch.frombuffer(own, dtype=torch.uint8) if own else torch.empty(0, dtype=torch.uint8)
    for start in range(0, max(sizes), PORTION):
        length = min(PORTION, max(sizes) - start)
        sent = torch.zeros(length, dtype=torch.uint8, device=device)
        portion = mine[start : start + length]
        sent[: len(portion)] = portion.to(device)
        if found is None:
            dist.gather(sent, dst=0)
            continue
        received = [torch.empty_like(sent) for _ in sizes]
        dist.gather(sent, received, dst=0)
        for memory, size, one in zip(found, sizes, received, strict=True):
            if (count := min(length, size - start)) > 0:
                torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=count).copy_(one[:count])
    return found
