"""Looks inside DDP, torch.compile and optimizers for the user's own modules and parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


def optimizers(parts: Mapping[str, Any]) -> dict[str, Any]:
    """The parts that are optimizers: torch's, and those of another library or the user's.

    The latter step and zero gradients, or are called ``optimizer`` and step. Schedulers only step, and a module may
    have methods of any name.
    """
    return {name: part for name, part in parts.items() if isinstance(part, torch.optim.Optimizer) or _steps(name, part)}


def _steps(name: str, part: Any) -> bool:
    zeroes = hasattr(part, "zero_grad") and not isinstance(part, torch.nn.Module)
    return hasattr(part, "step") and (name == "optimizer" or zeroes)


def trained_parameters(optimizer: Any) -> set[torch.Tensor]:
    """All parameters of an optimizer; none if it does not tell, as one of another library may not."""
    groups = getattr(optimizer, "param_groups", ())
    return {parameter for group in groups for parameter in group["params"]}


def bare(module: Any) -> torch.nn.Module:
    """The user's own module, without DDP and torch.compile around it."""
    while isinstance(module, DistributedDataParallel) or hasattr(module, "_orig_mod"):
        module = module.module if isinstance(module, DistributedDataParallel) else module._orig_mod
    return module  # type: ignore[no-any-return]


def ddp_modules(part: object) -> list[DistributedDataParallel]:
    """The DDP modules that a part is or contains."""
    modules = part.modules() if isinstance(part, torch.nn.Module) else ()
    return [module for module in modules if isinstance(module, DistributedDataParallel)]
