"""The state of a run's parts: under the bare model's names, and handed from rank 0 to all others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from clusterddp.errors import CheckpointError

#: Bytes that one broadcast carries at least: 2000 tensors of 20 KB one by one take 3.6 times as long.
_BUCKET = 1 << 25


class Stateful(Protocol):
    """Anything whose state is saved and restored: a module, an optimizer, a scheduler, a scaler."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def state_of(part: Stateful) -> dict[str, Any]:
    """A part's state; a module's under the names it has without DDP and torch.compile around it."""
    if not isinstance(part, torch.nn.Module):
        return part.state_dict()
    return {_bare_name(name): value for name, value in bare(part).state_dict().items()}


def load_state(part: Stateful, state: Mapping[str, Any]) -> None:
    """The inverse of ``state_of``."""
    if not isinstance(part, torch.nn.Module):
        part.load_state_dict(dict(state))
        return
    module = bare(part)
    names = {_bare_name(name): name for name in module.state_dict()}
    module.load_state_dict({names.get(name, name): value for name, value in state.items()})


def bare(module: Any) -> torch.nn.Module:
    """The user's own module, inside DDP and torch.compile."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif hasattr(module, "_orig_mod"):
            module = module._orig_mod
        else:
            result: torch.nn.Module = module
            return result


def _bare_name(name: str) -> str:
    return name.replace("_orig_mod.", "")


def broadcast(content: Any, error: CheckpointError | None, rank: int, device: torch.device) -> Any:
    """Rank 0's ``content``, a nested state or None, on all ranks; or its ``error``, raised on all ranks.

    Collective. Tensors travel through ``device`` and arrive on the CPU.
    """
    structure, tensors = split(content)
    shapes = [(tensor.dtype, tensor.shape) for tensor in tensors]
    verdict = [(str(error) if error else None, structure, shapes)]
    dist.broadcast_object_list(verdict, src=0, device=device)
    reason, structure, shapes = verdict[0]
    if reason is not None:
        raise error or CheckpointError(reason)
    if rank != 0:
        tensors = [torch.empty(shape, dtype=dtype) for dtype, shape in shapes]
    for bucket in _buckets(tensors):
        _broadcast_bucket(bucket, rank, device)
    return join(structure, tensors)


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        bucket.append(tensor)
        size += tensor.nbytes
        if size >= _BUCKET:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def _broadcast_bucket(bucket: list[torch.Tensor], rank: int, device: torch.device) -> None:
    """One broadcast for all tensors of a bucket; the other ranks' are filled in place."""
    parts = [_bytes(tensor) for tensor in bucket]
    packed = torch.cat(parts).to(device)
    dist.broadcast(packed, src=0)
    if rank != 0:
        received = torch.split(packed.cpu(), [len(part) for part in parts])
        for part, data in zip(parts, received, strict=True):
            part.copy_(data)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def split(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """A nested state as its structure, with an empty tensor in each tensor's place, and the tensors in order."""
    tensors: list[torch.Tensor] = []

    def walk(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            tensors.append(item)
            return torch.empty(0, dtype=item.dtype)
        if isinstance(item, dict):
            return {key: walk(entry) for key, entry in item.items()}
        if type(item) in (list, tuple):
            return type(item)(walk(entry) for entry in item)
        return item

    return walk(value), tensors


def join(structure: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The inverse of ``split``."""
    left = iter(tensors)

    def walk(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return next(left)
        if isinstance(item, dict):
            return {key: walk(entry) for key, entry in item.items()}
        return type(item)(walk(entry) for entry in item) if type(item) in (list, tuple) else item

    return walk(structure)
