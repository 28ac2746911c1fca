"""How a run's parts are sharded: their device mesh, and the place of each shard in its tensor.

Supported are the DTensors that ``fully_shard`` makes: sharded in one dimension over all ranks, or over a part of them
with replicas (HSDP).
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from clusterddp.distributed.wrapping import optimizers, trained_parameters

#: The first torch whose ``fully_shard`` and DTensor are supported.
FIRST_TORCH = (2, 9)
_SUPPORTED = (
    "Supported are models that torch.distributed.fsdp.fully_shard has sharded over all ranks in one dimension, or in "
    "groups of ranks with replicas (HSDP)"
)


@dataclass(frozen=True)
class Sharding:
    """The mesh over which the parts of a run are sharded."""

    mesh: Any

    @classmethod
    def of(cls, parts: Mapping[str, Any], world_size: int) -> Sharding | None:
        """The parts' sharding. None if no parameter is a DTensor.

        Raises RuntimeError for a torch that is too old, TypeError for a sharding that is not supported.
        """
        _check_modules(parts)
        found = _sharded_parameters(parts)
        if not found:
            return None
        check_version(torch.__version__)
        meshes: dict[Any, str] = {}
        for name, parameter in found.items():
            check_placements(name, parameter)
            meshes.setdefault(parameter.device_mesh, name)
        if len(meshes) > 1:
            one, other, *_ = meshes.values()
            raise TypeError(f"run(): {one} and {other} are sharded over different device meshes. {_SUPPORTED}")
        (mesh,) = meshes
        if mesh.size() != world_size:
            raise TypeError(f"run(): {meshes[mesh]} is sharded over {mesh.size()} of {world_size} ranks. {_SUPPORTED}")
        return cls(mesh)

    def placements(self, dim: int) -> list[Any]:
        """Of a DTensor that is sharded in this dimension, or replicated if it is -1."""
        from torch.distributed.tensor import Replicate, Shard

        last = Replicate() if dim < 0 else Shard(dim)
        return [*[Replicate()] * (self.mesh.ndim - 1), last]

    def empty(self, dtype: torch.dtype, shape: tuple[int, ...], dim: int) -> tuple[Any, torch.Tensor, int]:
        """A DTensor on this mesh, not initialized, this rank's shard of it, and where that begins in the dimension."""
        from torch.distributed.tensor import DTensor

        sizes, offset = list(shape), 0
        if dim >= 0:  # as Shard does it
            mesh_dim = self.mesh.ndim - 1
            most = -(-shape[dim] // self.mesh.size(mesh_dim))
            offset = min(most * self.mesh.get_local_rank(mesh_dim), shape[dim])
            sizes[dim] = min(most, shape[dim] - offset)
        shard = torch.empty(sizes, dtype=dtype, device=self.mesh.device_type)
        stride = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
        whole = DTensor.from_local(
            shard, self.mesh, self.placements(dim), run_check=False, shape=torch.Size(shape), stride=tuple(stride)
        )
        return whole, shard, offset


def check_version(version: str) -> None:
    """Raises RuntimeError for a torch that is too old for sharded models."""
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < FIRST_TORCH:
        first = ".".join(map(str, FIRST_TORCH))
        raise RuntimeError(
            f"run(): a sharded model needs torch {first} or newer, and this is torch {version}. Upgrade torch, or use "
            "ctx.wrap(model) instead of fully_shard"
        )


def dtensors() -> set[type]:
    """DTensor, without importing its module where nothing else has."""
    module = sys.modules.get("torch.distributed.tensor")
    return set() if module is None else {module.DTensor}


def is_sharded(tensor: object) -> bool:
    """Whether it is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_sharded_model(module: torch.nn.Module) -> bool:
    """Whether a parameter is a DTensor."""
    return any(map(is_sharded, module.parameters()))


def reshard(parts: Mapping[str, Any]) -> None:
    """Has FSDP free the whole parameters that it has kept, as it does after an evaluation, so that the modules'
    parameters are the DTensors."""
    for module in _fsdp_modules(parts):
        module.reshard()


def has_unreduced_gradients(parts: Iterable[torch.nn.Module]) -> bool:
    """Whether a backward in ``set_requires_gradient_sync(False)`` has left gradients that no backward has reduced.

    FSDP keeps them outside the parameters' ``grad``, as whole tensors that differ between ranks (torch 2.9 to 2.13).
    """
    for module in _fsdp_modules(dict(enumerate(parts))):
        state = module._get_fsdp_state()
        for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
            if group is None or group.reduce_grads:
                continue
            for one in group.fsdp_params:
                whole = getattr(one, "_unsharded_param", None)
                if one.unsharded_accumulated_grad is not None or getattr(whole, "grad", None) is not None:
                    return True
    return False


def _fsdp_modules(parts: Mapping[Any, Any]) -> Iterator[Any]:
    if (fsdp := sys.modules.get("torch.distributed.fsdp")) is None:
        return
    for part in parts.values():
        if isinstance(part, torch.nn.Module):
            yield from (module for module in part.modules() if isinstance(module, fsdp.FSDPModule))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor. An ordinary tensor itself."""
    return tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def like(tensor: Any, shard: torch.Tensor) -> torch.Tensor:
    """A DTensor sharded as ``tensor``, with this rank's shard."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        shard, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def shard_like(tensor: Any, whole: torch.Tensor) -> torch.Tensor:
    """A DTensor sharded as ``tensor``, with this rank's shard of a whole tensor, as a view.

    Raises ValueError for a different shape.
    """
    if is_sharded(whole):
        return whole
    if whole.shape != tensor.shape:
        raise ValueError(f"a tensor has the shape {tuple(whole.shape)}, but the model's has {tuple(tensor.shape)}")
    (chunk,) = tensor.__create_chunk_list__()
    for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return like(tensor, whole)


def dim_of(tensor: Any) -> int:
    """The dimension in which a DTensor is sharded. -1 if it is replicated."""
    from torch.distributed.tensor import Shard

    return next((placement.dim for placement in tensor.placements if type(placement) is Shard), -1)


def check_placements(name: str, tensor: Any) -> None:
    """Raises TypeError for a DTensor that cannot be saved."""
    from torch.distributed.tensor import Replicate, Shard

    *first, last = tensor.placements
    if len(first) <= 1 and all(type(one) is Replicate for one in first) and type(last) in (Shard, Replicate):
        return
    placed = ", ".join(map(str, tensor.placements))
    raise TypeError(f"run(): {name} has the placements ({placed}), as in tensor parallel training. {_SUPPORTED}")


def _check_modules(parts: Mapping[str, Any]) -> None:
    """Raises TypeError for a module that something other than ``fully_shard`` has sharded."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for name, part in parts.items():
        modules = list(part.modules()) if isinstance(part, torch.nn.Module) else []
        if fsdp is not None and any(isinstance(one, fsdp.FullyShardedDataParallel) for one in modules):
            raise TypeError(
                f"run(): {name} is wrapped in FullyShardedDataParallel, whose parameters are neither DTensors nor the "
                f"same on all ranks. Use torch.distributed.fsdp.fully_shard instead. {_SUPPORTED}"
            )
        by_fsdp = any(True for _ in _fsdp_modules({name: part}))
        if not by_fsdp and isinstance(part, torch.nn.Module) and is_sharded_model(part):
            raise TypeError(
                f"run(): {name} has DTensors that fully_shard did not make, as in tensor parallel training. "
                f"{_SUPPORTED}"
            )


def _sharded_parameters(parts: Mapping[str, Any]) -> dict[str, Any]:
    """By name: those of modules, and those that only an optimizer has."""
    found: dict[str, Any] = {
        f"{name}.{key}": one
        for name, part in parts.items()
        if isinstance(part, torch.nn.Module)
        for key, one in part.named_parameters()
        if is_sharded(one)
    }
    for name, part in optimizers(parts).items():
        if others := [one for one in trained_parameters(part) - set(found.values()) if is_sharded(one)]:
            found[f"a parameter of {name}"] = others[0]
    return found
