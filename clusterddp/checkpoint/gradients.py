"""Accumulated gradients: saves them when a checkpoint is taken between two steps of the optimizer.

A script may accumulate gradients over several steps of the loop, and no ``state_dict`` contains them. Inside
``no_sync`` each rank has its own, which all ranks must bring together for the checkpoint.

One hook per model notes each forward after which gradients may wait. The gradients themselves are read only for a
checkpoint, and in steps that begin while some wait. A hook on every parameter would take 1.4 us per parameter and step.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.nn.parallel import DistributedDataParallel

from clusterddp.checkpoint.sharded.sharding import has_unreduced_gradients, is_sharded_model
from clusterddp.checkpoint.state_dict import parameters_of
from clusterddp.distributed.torch_patches import Hook
from clusterddp.distributed.wrapping import ddp_modules, optimizers, trained_parameters

#: Gradients by part and parameter.
Named: TypeAlias = dict[str, dict[str, torch.Tensor]]


class _Exchange:
    """Parameters whose gradients are reduced together: those of a DDP module, or those of a part outside DDP.

    The parameters of one module wait together, because a backward may leave some unused, on this rank or on all.
    """

    def __init__(self, waiting: set[Any], apart: bool) -> None:
        self._waiting = waiting
        #: The parameters that optimizers train, and these optimizers.
        self.trained: list[torch.Tensor] = []
        self.trained_by: set[Any] = set()
        #: Whether the ranks' gradients differ. Outside DDP this never changes.
        self.apart = apart

    def forward(self, module: torch.nn.Module, *_: Any) -> None:
        """The module's hook: gradients will wait if a backward follows."""
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.trained):
            if isinstance(module, DistributedDataParallel):  # sets this in the forward: whether a backward will reduce
                self.apart = not module.require_forward_param_sync
            self._waiting |= self.trained_by


@dataclass(frozen=True)
class _Pending:
    """The gradients that wait, at the time that it is made, for a step of these optimizers."""

    optimizers: AbstractSet[Any] = frozenset()
    #: By parameter, as far as it has a gradient.
    marks: Mapping[torch.Tensor, tuple[int, int]] = field(default_factory=dict)
    #: The parameters whose gradients differ between ranks.
    apart: AbstractSet[torch.Tensor] = frozenset()

    def changed(self) -> bool:
        """Whether one of these gradients has changed since."""
        return any(_mark(parameter) != mark for parameter, mark in self.marks.items())


def _mark(parameter: torch.Tensor) -> tuple[int, int]:
    """Changes when the gradient does."""
    return id(parameter.grad), -1 if parameter.grad is None else parameter.grad._version


class Gradients:
    """The accumulated gradients of a run's models.

    They wait after a forward that follows their optimizer's last step. As a script may also call methods of a model, or
    modules in it, they wait as well if their optimizer did not step in the last step of the loop.
    """

    def __init__(self, parts: Mapping[str, Any], world_size: int, rank: int = 0) -> None:
        self._world_size, self._rank = world_size, rank
        #: What ``apart`` returned on each rank, since the step began; on rank 0, where the ranks have met.
        self.gathered: list[Named] | None = None
        self._modules = {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}
        self._in_ddp = [module for part in self._modules.values() for module in ddp_modules(part)]
        self._named_optimizers = optimizers(parts)
        self._optimizers = set(self._named_optimizers.values())
        #: The optimizers whose gradients wait, and those that have stepped in the current or last step of the loop.
        self._waiting = set[Any]()
        self._stepped = set(self._optimizers)
        #: What waited when the current step began.
        self._before = _Pending()
        self._sharded = [part for part in self._modules.values() if is_sharded_model(part)]
        #: Whether FSDP held gradients then that it has not reduced.
        self._unreduced_before = False
        self._exchange_of: dict[torch.Tensor, _Exchange] = {}
        exchanges: dict[torch.nn.Module, _Exchange] = {}
        for module in (*self._in_ddp, *self._modules.values()):
            in_ddp = isinstance(module, DistributedDataParallel)
            reduced = in_ddp or world_size == 1 or module in self._sharded
            exchange = exchanges.setdefault(module, _Exchange(self._waiting, apart=not reduced))
            for parameter in module.parameters():
                if parameter.is_floating_point() or parameter.is_complex():
                    self._exchange_of.setdefault(parameter, exchange)
        for optimizer in self._optimizers:
            for trained in self._trained(optimizer) & self._exchange_of.keys():
                self._exchange_of[trained].trained.append(trained)
                self._exchange_of[trained].trained_by.add(optimizer)
        for module, exchange in exchanges.items():
            if exchange.trained:
                module.register_forward_hook(Hook(exchange.forward))

    def begin_step(self) -> None:
        """Call it at the beginning of a step of the loop."""
        self._waiting |= self._optimizers - self._stepped
        self._before = self._pending() if self._waiting else _Pending()
        self._stepped, self.gathered = set(), None
        self._unreduced_before = has_unreduced_gradients(self._sharded)

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has stepped, and its gradients are used."""
        self._waiting.discard(optimizer)
        self._stepped.add(optimizer)

    def progress(self, before_step: bool) -> dict[str, Any]:
        """The gradients for a checkpoint. ``before_step``: of the state at the beginning of the current step."""
        pending = self._before if before_step else self._pending()
        if self.are_unreduced(before_step) or (before_step and pending.changed()):
            return {"gradients_lost": True}
        found: dict[str, Any] = {}
        if used := self._used(pending.optimizers):
            found["gradients_used"] = used
        if gradients := self._named(pending.marks.keys() - pending.apart):
            found["gradients"] = gradients
        if any(self.gathered or []):
            found["gradients_apart"] = self.gathered
        elif self._named(pending.apart):
            return {"gradients_lost": True}
        return found

    def _used(self, waiting: AbstractSet[Any]) -> dict[str, list[bool] | bool]:
        """Which parameters of each optimizer still have a gradient that a step has used. True if all have one.

        ``zero_grad(set_to_none=False)`` keeps it, as zeros, and the optimizer then updates a parameter that a step
        leaves unused: by its momentum and weight decay.
        """
        found: dict[str, list[bool] | bool] = {}
        for name, optimizer in self._named_optimizers.items():
            if optimizer not in waiting:
                kept = [_has_dense_gradient(parameter) for parameter in _in_order(optimizer)]
                if any(kept):
                    found[name] = all(kept) or kept
        return found

    def apart(self, before_step: bool) -> Named:
        """This rank's own gradients, which differ from other ranks', for ``gathered``."""
        return self._named((self._before if before_step else self._pending()).apart)

    @property
    def are_apart(self) -> bool:
        """Whether gradients wait that differ between ranks, so that a better place for a checkpoint comes soon."""
        return bool(self._pending().apart)

    def are_unreduced(self, before_step: bool) -> bool:
        """Whether FSDP holds gradients that no checkpoint contains, until a later backward reduces them."""
        return self._unreduced_before if before_step else has_unreduced_gradients(self._sharded)

    def unchanged(self) -> bool:
        """Whether those that waited when the current step began are unchanged, and rank 0 has all of them."""
        return not self._before.apart and not self._before.changed()

    def _pending(self) -> _Pending:
        """What waits now."""
        waiting = self._waiting | (self._optimizers - self._stepped)
        learned = set().union(*map(self._trained, waiting))
        marks = {parameter: _mark(parameter) for parameter in learned if parameter.grad is not None}
        apart = {one for one in marks.keys() & self._exchange_of.keys() if self._exchange_of[one].apart}
        return _Pending(waiting, marks, apart)

    def _named(self, parameters: AbstractSet[torch.Tensor]) -> Named:
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
            for module in self._in_ddp:
                _mark_used(module, self._parameters(apart[self._rank]))
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


def _mark_used(module: DistributedDataParallel, parameters: list[torch.nn.Parameter]) -> None:
    """Has DDP record that a backward in ``no_sync`` has used these parameters, as one did before a resume.

    Calls DDP's hooks, which note each use. Otherwise, with ``find_unused_parameters``, it would not reduce those that
    are unused in the backward that ends the accumulation. Leaves gradients of zero.
    """
    if not module.find_unused_parameters or module.static_graph:
        return
    own = {*module.parameters()}
    for parameter in parameters:
        if parameter in own and parameter.requires_grad:
            parameter.backward(torch.zeros_like(parameter))  # type: ignore[no-untyped-call]
