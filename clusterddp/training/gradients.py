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
        self._world_size = world_size
        #: Whether some wait, whether some did when the step being made began, whether it has made a backward.
        self._wait = self._waited = self._made = False
        #: Whether each rank has others: DDP exchanges them in the next backward without ``no_sync``.
        self._apart = False
        for part in self._modules.values():
            for parameter in [parameter for parameter in part.parameters() if parameter.requires_grad][-1:]:
                parameter.register_post_accumulate_grad_hook(lambda _, part=part: self._note(part))  # type: ignore[no-untyped-call]

    def _note(self, part: torch.nn.Module) -> None:
        self._wait = self._made = True
        exchanged = isinstance(part, DistributedDataParallel) and part.require_backward_grad_sync
        self._apart = self._world_size > 1 and not exchanged

    def begin_step(self) -> None:
        """A step of the loop begins."""
        self._waited, self._made = self._wait, False

    def stepped(self) -> None:
        """The optimizer has made its step: none wait."""
        self._wait = False

    def progress(self, before_step: bool) -> dict[str, Any]:
        """What a checkpoint holds of them. ``before_step``: it is of the state that the step being made began with."""
        if not (self._waited if before_step else self._wait):
            return {}
        if self._apart or (before_step and self._made):
            return {"gradients_lost": True}
        parameters = {name: parameters_of(part) for name, part in self._modules.items()}
        return {
            "gradients": {
                name: {key: parameter.grad for key, parameter in own.items() if parameter.grad is not None}
                for name, own in parameters.items()
            }
        }

    def restore(self, progress: Mapping[str, Any]) -> list[str]:
        """The inverse of ``progress``; why the resume is not exact."""
        for name, gradients in progress.get("gradients", {}).items():
            parameters = parameters_of(self._modules[name])
            for key, gradient in gradients.items():
                parameters[key].grad = gradient.to(parameters[key].device, copy=True)
            self._wait = True
        if "gradients_lost" in progress:
            return ["it was saved between a backward and its optimizer's step, without the gradients"]
        return []
