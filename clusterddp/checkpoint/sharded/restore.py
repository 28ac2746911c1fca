"""Restores a sharded checkpoint on any number of ranks: each rank reads only its part of each tensor.

All bytes that a rank reads are verified. Ranks load only once all have read and verified their parts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from clusterddp.checkpoint.packing import TORCH_DTYPES, unpack
from clusterddp.checkpoint.restore import OnDamaged, Place, Search
from clusterddp.checkpoint.sharded.folder import Chunk, Manifest, RankFile, ShardedCheckpoint, rank_file
from clusterddp.checkpoint.sharded.sharding import Sharding, local
from clusterddp.checkpoint.state_copies import offer
from clusterddp.checkpoint.store import Checkpoints
from clusterddp.checkpoint.verified_file import VerifiedFile
from clusterddp.distributed.collectives import all_gather_numbers, broadcast_json
from clusterddp.distributed.process_group import ProcessGroup
from clusterddp.errors import CheckpointError
from clusterddp.rundir.files import HIDDEN_S, exists


def restore_sharded(
    checkpoints: Checkpoints | None, sharding: Sharding, group: ProcessGroup, on_damaged: OnDamaged
) -> tuple[Any, Place] | None:
    """The state of the newest undamaged checkpoint, with this rank's shards as DTensors, and its place. None if there
    is none. Collective.

    Only rank 0 has ``checkpoints``. Raises CheckpointError on all ranks if there are checkpoints but all are damaged,
    or if the newest is that of a model that is not sharded.
    """
    search, device = Search(checkpoints, on_damaged), group.control_device
    tries = 0
    while True:
        found = search.next(ShardedCheckpoint, ShardedCheckpoint.read_state)
        told = manifest = None
        if found is not None:
            checkpoint, (manifest, text, state) = found
            told = [str(checkpoint.path), checkpoint.step, checkpoint.attempt, text, state]
        failure, told = broadcast_json([search.failure, told], device)
        if failure is not None:
            raise CheckpointError(failure)
        if told is None:
            return None
        path, step, attempt, text, state = told
        checkpoint = ShardedCheckpoint(Path(path), step, attempt)
        content, damage = _read(checkpoint, manifest or Manifest.decoded(text.encode()), state, sharding)
        damaged = any_failure(group, f"restore/{tries}", damage)
        tries += 1
        if damaged is None:
            return content, (attempt, step)
        search.report(damaged)


def any_failure(group: ProcessGroup, key: str, own: str | None) -> str | None:
    """Why a rank has failed, if any has. ``own``: this rank's reason. Collective."""
    if own is not None:
        group.store.set(f"{key}/{group.rank}", own)
    found = all_gather_numbers([int(own is not None)], group.control_device)
    rank = next((rank for rank, (damaged,) in enumerate(found) if damaged), None)
    return None if rank is None else group.store.get(f"{key}/{rank}").decode()


@dataclass(frozen=True)
class _Part:
    """What a rank needs of a chunk in a file: the ``count`` indices of dimension ``dim`` from ``first`` on."""

    name: str
    dim: int
    first: int
    count: int
    target: torch.Tensor


def _read(checkpoint: ShardedCheckpoint, manifest: Manifest, state: Any, sharding: Sharding) -> tuple[Any, str | None]:
    """The state with this rank's part of all tensors, or how the checkpoint is damaged."""
    tensors: dict[str, torch.Tensor] = {}
    parts: dict[int, list[_Part]] = {}
    for name, one in manifest.tensors.items():
        dtype, offset = TORCH_DTYPES[one.dtype], 0
        if one.dim is None:
            tensors[name] = shard = torch.empty(one.shape, dtype=dtype)
        else:
            tensors[name], shard, offset = sharding.empty(dtype, one.shape, one.dim)
        for chunk in one.chunks:
            if (part := _part(name, shard, offset, chunk, max(one.dim or 0, 0))) is not None:
                parts.setdefault(chunk.rank, []).append(part)
    try:
        for rank, of_file in parts.items():
            _read_file(checkpoint, rank, manifest.files[rank], of_file)
    except CheckpointError as error:
        return None, str(error)
    for tensor in tensors.values():
        offer(local(tensor))
    return unpack(state, tensors), None


def _part(name: str, shard: torch.Tensor, offset: int, chunk: Chunk, dim: int) -> _Part | None:
    """What a shard, which begins at ``offset`` of dimension ``dim``, needs of a chunk. None if that is nothing."""
    if not chunk.sizes:  # a number
        return _Part(name, 0, 0, 1, shard.view(1))
    start = max(offset, chunk.offsets[dim])
    count = min(offset + shard.shape[dim], chunk.offsets[dim] + chunk.sizes[dim]) - start
    if count <= 0:
        return None
    return _Part(name, dim, start - chunk.offsets[dim], count, shard.narrow(dim, start - offset, count))


def _read_file(checkpoint: ShardedCheckpoint, rank: int, expected: RankFile, parts: list[_Part]) -> None:
    """Reads all parts from a rank's file. Raises CheckpointError."""
    path = checkpoint.path / rank_file(rank)
    _await_visible(path)
    head = checkpoint.rank_head(rank, expected)
    direct: list[tuple[int, memoryview]] = []
    others: list[tuple[_Part, dict[str, Any]]] = []
    for part in parts:
        entry = head.entries[part.name]
        start, stop = entry["data_offsets"]
        length = entry["shape"][part.dim] if entry["shape"] else 1
        is_contiguous = part.dim == 0 or part.count == length
        if is_contiguous and part.target.device.type == "cpu" and part.target.is_contiguous():
            direct.append((start + part.first * (stop - start) // length, _bytes_of(part.target)))
        else:
            others.append((part, entry))
    with VerifiedFile(path, head, checkpoint.errors) as file:
        file.read_all(sorted(direct, key=lambda one: one[0]))
        for part, entry in sorted(others, key=lambda one: one[1]["data_offsets"][0]):
            _read_in_blocks(file, entry, part)


def _await_visible(file: Path) -> None:
    """Waits until a shared disk also shows this node a file that rank 0 has seen."""
    deadline = time.monotonic() + HIDDEN_S
    while not exists(file) and time.monotonic() < deadline:
        time.sleep(0.5)


#: The most bytes that are read at a time of a chunk of which only a part is needed, unless a row is larger.
_BLOCK = 1 << 22


def _read_in_blocks(file: VerifiedFile, entry: Mapping[str, Any], part: _Part) -> None:
    """Reads rows of the first dimension, and copies what is needed of them."""
    start, stop = entry["data_offsets"]
    shape = tuple(entry["shape"]) or (1,)
    row = (stop - start) // shape[0]
    rows, first = (part.count, part.first) if part.dim == 0 else (shape[0], 0)
    most = max(1, _BLOCK // row)
    for begin in range(0, rows, most):
        end = min(begin + most, rows)
        block = torch.empty((end - begin, *shape[1:]), dtype=part.target.dtype)
        file.read_into(_bytes_of(block), start + (first + begin) * row)
        if part.dim > 0:
            block = block.narrow(part.dim, part.first, part.count)
        part.target[begin:end].copy_(block)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy().data)
