"""Accumulated gradients: saves them when a checkpoint is taken between two steps of the optimizer.

A script may accumulate gradients over several steps of the loop, and no ``state_dict`` contains them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from clusterddp.checkpoint.state import parameters_of
from clusterddp.distributed.modules import ddp_modules, optimizers, trained_parameters


class _Exchange:
    """Parameters whose gradients are reduced together: those of a DDP module, or those of a part outside DDP.

    In a backward some of them may be unused, on this rank or on all: the parameters of one module wait together.
    """

    def __init__(self, module: DistributedDataParallel | None, alone: bool) -> None:
        self._module, self._alone = module, alone
        #: The optimizers of its parameters.
        self.trained_by: set[Any] = set()
        #: The last parameter that got a gradient. The hook is a method of deque: 0.1 us per parameter.
        self._last: deque[torch.Tensor] = deque(maxlen=1)
        #: Whether the ranks' gradients differ: DDP reduces them in the next backward without ``no_sync``.
        self.apart = False

    def watch(self, parameter: torch.nn.Parameter) -> None:
        """Registers the hook, also on a parameter that is frozen for now."""
        trained = parameter.requires_grad
        parameter.requires_grad_(True).register_post_accumulate_grad_hook(self._last.append)  # type: ignore[no-untyped-call]
        parameter.requires_grad_(trained)

    def take(self) -> bool:
        """Whether there was a backward since the last call."""
        if not self._last:
            return False
        self._last.clear()
        # DDP sets this in the forward: whether the backward will reduce.
        exchanged = self._module is not None and self._module.require_forward_param_sync
        self.apart = not (self._alone or exchanged)
        return True


class Gradients:
    """The accumulated gradients of a run's models."""

    def __init__(self, parts: Mapping[str, Any], world_size: int) -> None:
        self._modules = {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}
        self._optimizers = set(optimizers(parts).values())
        #: The optimizers that have not stepped since a backward, now and at the beginning of the current step.
        self._waiting: set[Any] = set()
        self._waited = self._waiting
        #: The optimizers of parameters that got a gradient in the current step.
        self._made: set[Any] = set()
        self._exchanges: list[_Exchange] = []
        self._exchange_of: dict[torch.Tensor, _Exchange] = {}
        for part in self._modules.values():
            for module in (*ddp_modules(part), None):
                exchange = _Exchange(module, alone=world_size == 1)
                self._exchanges.append(exchange)
                for parameter in (module or part).parameters():
                    if parameter not in self._exchange_of and (parameter.is_floating_point() or parameter.is_complex()):
                        self._exchange_of[parameter] = exchange
                        exchange.watch(parameter)
        for optimizer in self._optimizers:
            for trained in self._trained(optimizer) & self._exchange_of.keys():
                self._exchange_of[trained].trained_by.add(optimizer)

    def note(self) -> None:
        """Records a backward, if there was one. Call it before a step, an optimizer's step and an evaluation."""
        for exchange in self._exchanges:
            if exchange.take():
                self._waiting |= exchange.trained_by
                self._made |= exchange.trained_by

    def begin_step(self) -> None:
        """Call it at the beginning of a step of the loop."""
        self.note()
        self._waited, self._made = set(self._waiting), set()

    @property
    def made(self) -> bool:
        """Whether the current step of the loop has run a backward."""
        self.note()
        return bool(self._made)

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has stepped: its gradients are used."""
        self.note()
        self._waiting.discard(optimizer)

    def progress(self, before_step: bool) -> dict[str, Any]:
        """The gradients for a checkpoint. ``before_step``: of the state at the beginning of the current step."""
        self.note()
        waiting = self._waited if before_step else self._waiting
        learned = set().union(*map(self._trained, waiting))
        gradients = {
            name: {key: one.grad for key, one in parameters_of(part).items() if one in learned and one.grad is not None}
            for name, part in self._modules.items()
            if learned
        }
        if not any(gradients.values()):
            return {}
        apart = {parameter for parameter, exchange in self._exchange_of.items() if exchange.apart}
        changed = set().union(*map(self._trained, waiting & self._made)) if before_step else set()
        if any(one.grad is not None for one in (learned & apart) | changed):
            return {"gradients_lost": True}
        return {"gradients": gradients}

    def _trained(self, optimizer: Any) -> set[torch.Tensor]:
        """The optimizer's parameters; all of them if it does not tell."""
        return trained_parameters(optimizer) or set(self._exchange_of)

    def restore(self, progress: Mapping[str, Any]) -> list[str]:
        """The inverse of ``progress``; returns the reasons why the resume is not exact."""
        for name, gradients in progress.get("gradients", {}).items():
            parameters = parameters_of(self._modules[name])
            for key, gradient in gradients.items():
                parameters[key].grad = gradient.to(parameters[key].device, copy=True)
                self._waiting |= self._exchange_of[parameters[key]].trained_by
        if "gradients_lost" in progress:
            return ["the checkpoint was taken between a backward and its optimizer's step, without the gradients"]
        return []
