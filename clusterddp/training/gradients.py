"""Gradients that wait for their optimizer's step: a script that accumulates them over several steps of the loop may be
saved, or stopped, between two of the optimizer's steps, and no part's ``state_dict`` has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from clusterddp.training.state import parameters_of


class Gradients:
    """Of the run's models. That a backward was made is seen at one parameter of each: a step costs nothing else."""

    def __init__(self, parts: Mapping[str, Any], world_size: int) -> None:
        self._modules = {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}
        self._optimizers = {part for part in parts.values() if isinstance(part, torch.optim.Optimizer)}
        self._world_size = world_size
        #: The optimizers that have not stepped since a backward, and those that had not when the step being made began.
        self._waiting: set[torch.optim.Optimizer] = set()
        self._waited = self._waiting
        #: Whether the step being made has made a backward.
        self._made = False
        #: Whether each rank has gradients of its own: DDP exchanges them in the next backward without ``no_sync``.
        self._apart = False
        for part in self._modules.values():
            for parameter in [parameter for parameter in part.parameters() if parameter.requires_grad][-1:]:
                parameter.register_post_accumulate_grad_hook(lambda _, part=part: self._note(part))  # type: ignore[no-untyped-call]

    def _note(self, part: torch.nn.Module) -> None:
        self._waiting, self._made = set(self._optimizers), True
        exchanged = isinstance(part, DistributedDataParallel) and part.require_backward_grad_sync
        self._apart = self._world_size > 1 and not exchanged

    def begin_step(self) -> None:
        """A step of the loop begins."""
        self._waited, self._made = set(self._waiting), False

    def stepped(self, optimizer: torch.optim.Optimizer | None) -> None:
        """An optimizer has made its step, all of them when None: what it waited for is done with."""
        self._waiting -= self._optimizers if optimizer is None else {optimizer}

    def progress(self, before_step: bool) -> dict[str, Any]:
        """What a checkpoint holds of them. ``before_step``: it is of the state that the step being made began with."""
        waiting = self._waited if before_step else self._waiting
        learned = {id(one) for optimizer in waiting for group in optimizer.param_groups for one in group["params"]}
        gradients = {
            name: {
                key: one.grad for key, one in parameters_of(part).items() if id(one) in learned and one.grad is not None
            }
            for name, part in self._modules.items()
            if learned
        }
        if not any(gradients.values()):
            return {}
        if self._apart or (before_step and self._made):
            return {"gradients_lost": True}
        return {"gradients": gradients}

    def restore(self, progress: Mapping[str, Any]) -> list[str]:
        """The inverse of ``progress``; why the resume is not exact."""
        for name, gradients in progress.get("gradients", {}).items():
            parameters = parameters_of(self._modules[name])
            for key, gradient in gradients.items():
                parameters[key].grad = gradient.to(parameters[key].device, copy=True)
        if "gradients" in progress:
            self._waiting = set(self._optimizers)
        if "gradients_lost" in progress:
            return ["it was saved between a backward and its optimizer's step, without the gradients"]
        return []
