"""Looks inside DDP, torch.compile and optimizers for the user's own modules and parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


def trained_parameters(optimizer: torch.optim.Optimizer) -> set[torch.Tensor]:
    """All parameters of an optimizer."""
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}


def bare(module: Any) -> torch.nn.Module:
    """The user's own module, without DDP and torch.compile around it."""
    while isinstance(module, DistributedDataParallel) or hasattr(module, "_orig_mod"):
        module = module.module if isinstance(module, DistributedDataParallel) else module._orig_mod
    return module  # type: ignore[no-any-return]


def ddp_modules(part: object) -> list[DistributedDataParallel]:
    """The DDP modules that a part is or contains."""
    modules = part.modules() if isinstance(part, torch.nn.Module) else ()
    return [module for module in modules if isinstance(module, DistributedDataParallel)]
