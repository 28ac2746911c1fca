"""DistributedDataParallel around the user's model, so that a resumed run sums gradients in the same order."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from clusterddp.distributed.modules import bare, ddp_modules, trained_parameters
from clusterddp.process import at_exit

#: The modules made here, and those of them whose buckets have their final order.
_made: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
_settled: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


class _SumOfParameters(torch.nn.Module):
    """Stands in for the user's model: every parameter takes part, no batch and no buffer does."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__()
        device = parameters[0].device if parameters else None  # they may be on several
        self._sums = lambda: [parameter.sum().abs().float().to(device) for parameter in parameters]

    def forward(self) -> torch.Tensor:
        return torch.stack(self._sums()).sum() * 0  # type: ignore[no-untyped-call]


def wrap(
    model: torch.nn.Module, devices: Sequence[torch.device], *, all_used_once: bool = False, **options: Any
) -> DistributedDataParallel:
    """The model on its device, in DDP, with its gradient buckets in their final order. Over several, it is not moved.

    DDP rebuilds its buckets after the first iteration, by the order in which gradients came. A resumed run would make
    that first iteration at step S, sum it in the old order, and differ from the uninterrupted run from there on (seen
    at 3 and more ranks). A throw-away pass settles the order before any step, here and after every resume.

    Not so with ``static_graph``: DDP takes how often each parameter is used from the first pass it sees. With a made-up
    one it then refuses a model with unused parameters, and sums reentrant checkpointing's gradients too early (seen in
    2.13: wrong gradients, no error). Such a resume is not exact at 3 and more ranks, unless the caller promises by
    ``all_used_once`` that the made-up passes tell the truth: every parameter gets its gradient in every backward, and
    gets it in one piece. DDP then counts in the first pass, and notes the order in the second.

    Of a broken promise, DDP itself refuses the unused parameter, in the second step; a gradient in several pieces
    raises RuntimeError in the first backward. TypeError: ``all_used_once`` without ``static_graph`` means nothing.
    """
    _check_unwrapped(model)
    static_graph = options.get("static_graph", False)
    if all_used_once and not static_graph:
        raise TypeError("all_used_once=True is for static_graph=True; without it a resume is exact as it is")
    if len(devices) == 1:
        model = model.to(devices[0])
        if devices[0].type == "cuda":
            options = {"device_ids": [devices[0].index], **options}
    wrapped = DistributedDataParallel(model, **options)
    if not _made:
        at_exit(_let_go_of_the_group)
    _made.add(wrapped)
    if all_used_once or not static_graph:
        _settle_buckets(wrapped, passes=2 if static_graph else 1)
        _settled.add(wrapped)
    if all_used_once:
        _check_first_backward(wrapped)
    return wrapped


def _check_unwrapped(model: torch.nn.Module) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"wrap() was given a {type(model).__name__}: expected a torch.nn.Module")
    if ddp_modules(model):
        raise TypeError(
            f"wrap() was given a {type(model).__name__} that is in DDP, or contains a module that is, already"
        )
    if _is_wrapped(model):
        gc.collect()  # a wrapper that the script has dropped
    if _is_wrapped(model):
        raise TypeError(f"this {type(model).__name__} was wrapped before: use what the first wrap() returned")


def _is_wrapped(model: torch.nn.Module) -> bool:
    return any(bare(wrapped) is bare(model) for wrapped in _made)


def doubt(wrapped: DistributedDataParallel) -> str | None:
    """Why a resume may sum gradients in another order, at 3 and more ranks; None if it cannot."""
    rebuilds = wrapped.static_graph or not wrapped.find_unused_parameters
    if wrapped in _settled or not rebuilds:
        return None
    if wrapped.static_graph:
        return "is in DDP with static_graph=True, without all_used_once=True"
    return "is in DDP that ctx.wrap() did not make"


class Buffers:
    """The buffers of the models in DDP.

    From a forward on, each rank has its own batch's BatchNorm statistics; DDP broadcasts rank 0's before the next. What
    an average or an evaluation takes of them in between would not be the same after a resume, which gives all ranks
    rank 0's. So that broadcast is made earlier: once the optimizer has stepped, and at the end of a step of the loop.
    """

    def __init__(self, parts: Iterable[object]) -> None:
        parts = list(parts)
        self._modules = [module for part in parts for module in ddp_modules(part)]
        self._trained_by = {
            part: [module for module in self._modules if trained_parameters(part) & set(module.parameters())]
            for part in parts
            if isinstance(part, torch.optim.Optimizer)
        }

    def share(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Gives all ranks rank 0's, of the models that an optimizer trains, or of all. Collective."""
        for module in self._modules if optimizer is None else self._trained_by.get(optimizer, ()):
            if module._check_sync_bufs_pre_fwd():  # type: ignore[no-untyped-call]
                module._sync_buffers()  # type: ignore[no-untyped-call]
                module.require_forward_param_sync = False


def _let_go_of_the_group() -> None:
    """At exit, before the context leaves the group, though the script's variables keep their models.

    A thread of gloo's that frees its last piece of work takes the GIL. After the interpreter's end that aborts the
    process ("terminate called without an active exception"), so the group must end first: it waits for its threads
    when its last owner goes. If that is a reducer, it holds the GIL, and the wait has no end. Both in torch 2.13.
    """
    for wrapped in list(_made):
        for owner in ("logger", "reducer", "process_group"):
            wrapped.__dict__.pop(owner, None)


def _settle_buckets(wrapped: DistributedDataParallel, passes: int) -> None:
    """Passes through all parameters: DDP rebuilds its buckets by them, before the next. Nothing else is touched."""
    model, broadcast_buffers = wrapped.module, wrapped.broadcast_buffers
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    wrapped._modules["module"], wrapped.broadcast_buffers = _SumOfParameters(parameters), False
    try:
        for _ in range(passes):
            wrapped().backward()
    finally:
        wrapped._modules["module"], wrapped.broadcast_buffers = model, broadcast_buffers
    for parameter in parameters:
        parameter.grad = None


def _check_first_backward(wrapped: DistributedDataParallel) -> None:
    """Raises in the first backward if a parameter gets its gradient in pieces: DDP would send off the first alone."""
    names = {id(parameter): name for name, parameter in wrapped.module.named_parameters() if parameter.requires_grad}
    seen: set[str] = set()

    def note(parameter: torch.Tensor) -> None:
        name = names[id(parameter)]
        if name in seen:
            raise RuntimeError(
                f"wrap() was told all_used_once=True, but {name} got its gradient in several pieces in one backward "
                "(reentrant checkpointing does that): checkpoint with use_reentrant=False, or leave all_used_once out"
            )
        seen.add(name)

    def end(*_: Any) -> None:
        if seen:
            for handle in handles:
                handle.remove()

    parameters = [parameter for parameter in wrapped.module.parameters() if parameter.requires_grad]
    handles = [parameter.register_post_accumulate_grad_hook(note) for parameter in parameters]
    handles.append(wrapped.register_forward_pre_hook(end))
