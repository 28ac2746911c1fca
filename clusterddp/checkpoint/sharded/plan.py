"""What each rank writes of a sharded state: planned once, and again when names, dtypes, shapes or placements change.

Every rank writes its shards. A shard that several ranks have (HSDP) is written by one of them, a different one for
different tensors. Rank 0 alone writes all other tensors, and the state without its tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from clusterddp.checkpoint.packing import DTYPES, Packed
from clusterddp.checkpoint.sharded.sharding import check_placements, dim_of
from clusterddp.errors import CheckpointError

#: The key of torch.distributed.checkpoint's HuggingFaceStorageReader in a file's metadata.
DCP_KEY = "DCP_SHARDING_INFO"


@dataclass(frozen=True)
class Written:
    """A tensor, or the part of one, that this rank writes."""

    dtype: str
    shape: tuple[int, ...]
    dim: int | None
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """What one rank writes, and what is the same on all ranks."""

    described: Any
    """What the plan was made for. While it stays equal, so does the plan."""
    places: list[int]
    """The tensors in ``Packed.tensors`` that this rank writes."""
    written: dict[str, Written]
    common: dict[str, tuple[str, tuple[int, ...], int | None]]
    """Of all tensors that every rank has: dtype, whole shape, and the dimension in which it is sharded."""

    @classmethod
    def of(cls, packed: Packed, rank: int) -> Plan:
        """Raises CheckpointError for a DTensor that cannot be saved."""
        places: list[int] = []
        written: dict[str, Written] = {}
        common: dict[str, tuple[str, tuple[int, ...], int | None]] = {}
        for place, (name, tensor) in enumerate(packed.tensors.items()):
            whole = packed.sharded.get(name)
            dtype = DTYPES[tensor.dtype]
            if whole is None:
                if not name.startswith("progress."):
                    common[name] = (dtype, tuple(tensor.shape), None)
                if rank == 0:
                    places.append(place)
                    offsets = (0,) * tensor.dim()
                    written[name] = Written(dtype, tuple(tensor.shape), None, offsets, tuple(tensor.shape))
                continue
            common[name] = (dtype, tuple(whole.shape), dim_of(whole))
            one = _written(name, tensor, whole)
            if tensor.numel() and _is_writer(whole, len(common)):
                places.append(place)
                written[name] = one
        return cls(description(packed), places, written, common)

    @cached_property
    def digest(self) -> str:
        """Equal on two ranks if their states have the same tensors."""
        return hashlib.blake2b(json.dumps(self.common).encode(), digest_size=16).hexdigest()

    @property
    def table(self) -> dict[str, list[Any]]:
        """``written`` as JSON, for rank 0."""
        return {name: [one.dtype, one.shape, one.dim, one.offsets, one.sizes] for name, one in self.written.items()}

    @cached_property
    def facts(self) -> dict[str, str]:
        """The entries of the file's metadata, from which torch's own reader learns the place of each shard."""
        places = {name: {"saved_offsets": one.offsets} for name, one in self.written.items()}
        return {DCP_KEY: json.dumps({**places, "checksums": {"saved_offsets": [0]}})}


class PackedShard(Packed):
    """``Packed``, with only the tensors that this rank writes."""

    def __init__(self, content: Mapping[str, Any], rank: int, plan: Plan | None) -> None:
        with torch.no_grad():
            super().__init__(content)
        self.plan = plan if plan is not None and plan.described == description(self) else Plan.of(self, rank)
        self.facts = self.plan.facts
        self._rank = rank
        self.select(self.plan.places)

    def plain(self) -> Any:
        """The state as JSON values, on rank 0. None on other ranks, whose files hold only tensors."""
        return super().plain() if self._rank == 0 else None


def description(packed: Packed) -> Any:
    """All that a plan depends on. A save compares it, while training waits."""
    wholes = packed.sharded.values()
    return packed.layout, list(packed.sharded), [(one.shape, one.placements, one.device_mesh) for one in wholes]


def _written(name: str, tensor: torch.Tensor, whole: Any) -> Written:
    check_placements(name, whole)
    (chunk,) = whole.__create_chunk_list__()
    if tuple(chunk.sizes) != tuple(tensor.shape):
        raise CheckpointError(
            f"cannot save {name}: its shard has the shape {tuple(tensor.shape)}, but its placements say "
            f"{tuple(chunk.sizes)}. Let fully_shard place it"
        )
    dtype, shape = DTYPES[tensor.dtype], tuple(whole.shape)
    return Written(dtype, shape, dim_of(whole), tuple(chunk.offsets), tuple(chunk.sizes))


def _is_writer(whole: Any, number: int) -> bool:
    """Whether this rank is the one that writes its shard, of those that have the same one."""
    mesh = whole.device_mesh
    coordinate = list(mesh.get_coordinate())
    if dim_of(whole) < 0:  # replicated in all dimensions
        return not any(coordinate)
    return mesh.ndim == 1 or bool(coordinate[0] == number % mesh.size(0))
