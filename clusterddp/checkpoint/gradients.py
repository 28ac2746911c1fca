"""Accumulated gradients: saves them when a checkpoint is taken between two steps of the optimizer.

A script may accumulate gradients over several steps of the loop, and no ``state_dict`` contains them. Inside
``no_sync`` each rank has its own, which all ranks must bring together for the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.nn.parallel import DistributedDataParallel

from clusterddp.checkpoint.state_dict import parameters_of
from clusterddp.distributed.wrapping import ddp_modules, optimizers, trained_parameters

#: Gradients by part and parameter.
Named: TypeAlias = dict[str, dict[str, torch.Tensor]]


@dataclass
class _Seen:
    """Whether a parameter got a gradient. The hooks hold only this, or a model would be freed late."""

    gradient: bool = False


class _Exchange:
    """Parameters whose gradients are reduced together: those of a DDP module, or those of a part outside DDP.

    The parameters of one module wait together, because a backward may leave some unused, on this rank or on all.
    """

    def __init__(self, module: DistributedDataParallel | None, alone: bool) -> None:
        self._module, self._alone = module, alone
        #: The optimizers of its parameters.
        self.trained_by: set[Any] = set()
        self._seen = _Seen()  # since the last ``take``
        #: Whether the ranks' gradients differ, until DDP reduces them in the next backward without ``no_sync``.
        self.apart = False

    def watch(self, parameter: torch.nn.Parameter) -> None:
        """Registers the hook, also on a parameter that is frozen for now."""
        seen = self._seen

        def note(_: torch.Tensor) -> None:
            seen.gradient = True

        trained = parameter.requires_grad
        parameter.requires_grad_(True).register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
        parameter.requires_grad_(trained)

    def take(self) -> bool:
        """Whether there was a backward since the last call."""
        if not self._seen.gradient:
            return False
        self._seen.gradient = False
        # DDP sets this in the forward: whether the backward will reduce.
        exchanged = self._module is not None and self._module.require_forward_param_sync
        self.apart = not (self._alone or exchanged)
        return True

    def mark_used(self, parameters: list[torch.nn.Parameter]) -> None:
        """Has DDP record that a backward in ``no_sync`` has used these parameters, as one did before a resume.

        Calls DDP's hooks, which note each use. Otherwise, with ``find_unused_parameters``, it would not reduce those
        that are unused in the backward that ends the accumulation. Leaves gradients of zero.
        """
        module = self._module
        if module is None or not module.find_unused_parameters or module.static_graph:
            return
        own = {*module.parameters()}
        for parameter in parameters:
            if parameter in own and parameter.requires_grad:
                parameter.backward(torch.zeros_like(parameter))  # type: ignore[no-untyped-call]
        self._seen.gradient = False


class Gradients:
    """The accumulated gradients of a run's models."""

    def __init__(self, parts: Mapping[str, Any], world_size: int, rank: int = 0) -> None:
        self._world_size, self._rank = world_size, rank
        #: What ``apart`` returned on each rank, since the step began; on rank 0, where the ranks have met.
        self.gathered: list[Named] | None = None
        self._modules = {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}
        self._named_optimizers = optimizers(parts)
        self._optimizers = set(self._named_optimizers.values())
        #: The optimizers that have not stepped since a backward, now and at the beginning of the current step.
        self._waiting: set[Any] = set()
        self._waited = self._waiting
        #: The optimizers of parameters that got a gradient in the current step.
        self._made: set[Any] = set()
        self._exchange_of: dict[torch.Tensor, _Exchange] = {}
        for part in self._modules.values():
            for module in (*ddp_modules(part), None):
                exchange = _Exchange(module, alone=world_size == 1)
                for parameter in (module or part).parameters():
                    if parameter not in self._exchange_of and (parameter.is_floating_point() or parameter.is_complex()):
                        self._exchange_of[parameter] = exchange
                        exchange.watch(parameter)
        self._exchanges = list(dict.fromkeys(self._exchange_of.values()))
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
        self._waited, self._made, self.gathered = set(self._waiting), set(), None

    @property
    def made(self) -> bool:
        """Whether the current step of the loop has run a backward."""
        self.note()
        return bool(self._made)

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has stepped, and its gradients are used."""
        self.note()
        self._waiting.discard(optimizer)

    def progress(self, before_step: bool) -> dict[str, Any]:
        """The gradients for a checkpoint. ``before_step``: of the state at the beginning of the current step."""
        together, apart, changed = self._waiting_parameters(before_step)
        if any(one.grad is not None for one in changed):
            return {"gradients_lost": True}
        found: dict[str, Any] = {}
        if used := self._used(before_step):
            found["gradients_used"] = used
        if gradients := self._named(together):
            found["gradients"] = gradients
        if any(self.gathered or []):
            found["gradients_apart"] = self.gathered
        elif self._named(apart):
            return {"gradients_lost": True}
        return found

    def _used(self, before_step: bool) -> dict[str, list[bool] | bool]:
        """Which parameters of each optimizer still have a gradient that a step has used. True if all have one.

        ``zero_grad(set_to_none=False)`` keeps it, as zeros, and the optimizer then updates a parameter that a step
        leaves unused: by its momentum and weight decay.
        """
        waiting = self._waited if before_step else self._waiting
        found: dict[str, list[bool] | bool] = {}
        for name, optimizer in self._named_optimizers.items():
            if optimizer not in waiting:
                kept = [_has_dense_gradient(parameter) for parameter in _in_order(optimizer)]
                if any(kept):
                    found[name] = all(kept) or kept
        return found

    def apart(self, before_step: bool) -> Named:
        """This rank's own gradients, which differ from other ranks', for ``gathered``."""
        return self._named(self._waiting_parameters(before_step)[1])

    @property
    def are_apart(self) -> bool:
        """Whether gradients wait that differ between ranks, so that a better place for a checkpoint comes soon."""
        self.note()
        return any(exchange.apart and exchange.trained_by & self._waiting for exchange in self._exchanges)

    def _waiting_parameters(self, before_step: bool) -> tuple[set[torch.Tensor], set[torch.Tensor], set[torch.Tensor]]:
        """Parameters whose gradients wait: equal on all ranks, differing, and changed by a step that is not done."""
        self.note()
        waiting = self._waited if before_step else self._waiting
        learned = set().union(*map(self._trained, waiting))
        changed = set().union(*map(self._trained, waiting & self._made)) if before_step else set()
        apart = {one for one in learned & self._exchange_of.keys() if self._exchange_of[one].apart}
        return learned - apart, apart, changed

    def _named(self, parameters: set[torch.Tensor]) -> Named:
        """The gradients of these parameters, by part and name."""
        found: Named = {}
        for name, part in self._modules.items() if parameters else ():
            own = {key: p.grad for key, p in parameters_of(part).items() if p in parameters and p.grad is not None}
            found |= {name: own} if own else {}
        return found

    def _trained(self, optimizer: Any) -> set[torch.Tensor]:
        """The optimizer's parameters. All of the run's if they are unknown."""
        return trained_parameters(optimizer) or set(self._exchange_of)

    def restore(self, progress: Mapping[str, Any]) -> list[str]:
        """The inverse of ``progress``. Returns the reasons why the resume is not exact."""
        apart = progress.get("gradients_apart", [])
        if "gradients_lost" in progress or (apart and len(apart) != self._world_size):
            return ["the checkpoint was taken between a backward pass and the optimizer's step, without the gradients"]
        self._load(progress.get("gradients", {}))
        for gradients in apart:  # a parameter may be unused on some ranks
            for parameter in self._parameters(gradients):
                self._exchange_of[parameter].apart = True
                self._waiting |= self._exchange_of[parameter].trained_by
        if apart:
            for exchange in self._exchanges:
                exchange.mark_used(self._parameters(apart[self._rank]))
            self._load(apart[self._rank])
        self._load_used(progress.get("gradients_used", {}))
        return []

    def _load_used(self, used: Mapping[str, list[bool] | bool]) -> None:
        """Zeros for the parameters of ``_used``, whose gradients nothing reads before they are zeroed."""
        for name, kept in used.items():
            parameters = _in_order(self._named_optimizers[name])
            marks = [kept] * len(parameters) if isinstance(kept, bool) else kept
            for parameter, mark in zip(parameters, marks, strict=False):
                if mark and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

    def _load(self, gradients: Named) -> None:
        for name, of_part in gradients.items():
            parameters = parameters_of(self._modules[name])
            for key, gradient in of_part.items():
                parameters[key].grad = gradient.to(parameters[key].device, copy=True)
                self._waiting |= self._exchange_of[parameters[key]].trained_by

    def _parameters(self, gradients: Named) -> list[torch.nn.Parameter]:
        return [parameters_of(self._modules[name])[key] for name, of_part in gradients.items() for key in of_part]


def _in_order(optimizer: Any) -> list[torch.Tensor]:
    """The optimizer's parameters in the order by which torch identifies them. Empty if they are unknown."""
    return [parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]]


def _has_dense_gradient(parameter: torch.Tensor) -> bool:
    """Whether a parameter has a gradient that is not sparse. Zeros would make the next sparse gradient dense."""
    gradient = parameter.grad
    return gradient is not None and gradient.layout is torch.strided
