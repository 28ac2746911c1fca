"""A checkpoint's content on all ranks: rank 0 alone reads the file, once, and hands it on."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from clusterddp.archive import Content
from clusterddp.errors import CheckpointError
from clusterddp.training.state import TORCH_DTYPES, unpack

#: Bytes that one broadcast carries: 2000 tensors of 20 KB one by one take 3.6 times as long.
_PORTION = 1 << 25


Place = tuple[int, int]


def broadcast(
    found: tuple[Content, Place] | None, error: CheckpointError | None, rank: int, device: torch.device
) -> tuple[Any, Place] | None:
    """What rank 0 has found, on all ranks: a nested state, tensors on the CPU, and its place (attempt, step).

    Collective. None for None; rank 0's ``error`` is raised on all ranks. The data travels through ``device``, a portion
    at a time.
    """
    told = [(str(error), None, None) if error else (None, found and found[1], found and _without_data(found[0]))]
    dist.broadcast_object_list(told, src=0, device=device)
    reason, place, described = told[0]
    if reason is not None:
        raise error or CheckpointError(reason)
    if place is None or described is None:
        return None
    entries, facts, state, size = described
    content = found[0] if found else None
    data = content.data if content is not None else bytearray(size)
    if size and dist.get_world_size() > 1:
        _broadcast_data(torch.frombuffer(data, dtype=torch.uint8), rank, device)
    return unpacked(Content(entries, facts, state, data)), place


def unpacked(content: Content) -> Any:
    """The nested state in a checkpoint's content. Every tensor has memory of its own."""
    return unpack(content.state, tensors(content))


def tensors(content: Content) -> dict[str, torch.Tensor]:
    """The tensors in a checkpoint's content, by name, copied out of its data."""
    return {name: _tensor(entry, content.data) for name, entry in content.entries.items()}


def _without_data(content: Content) -> tuple[Any, ...]:
    return (content.entries, content.facts, content.state, len(content.data))


def _broadcast_data(data: torch.Tensor, rank: int, device: torch.device) -> None:
    for portion in torch.split(data, _PORTION):
        moved = portion.to(device)
        dist.broadcast(moved, src=0)
        if rank != 0 and moved is not portion:
            portion.copy_(moved)


def _tensor(entry: dict[str, Any], data: bytearray) -> torch.Tensor:
    start, stop = entry["data_offsets"]
    dtype = TORCH_DTYPES[entry["dtype"]]
    if start == stop:
        return torch.empty(entry["shape"], dtype=dtype)
    view = torch.frombuffer(data, dtype=torch.uint8, offset=start, count=stop - start)
    return view.clone().view(dtype).reshape(entry["shape"])
