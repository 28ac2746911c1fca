"""Wraps the user's model in DistributedDataParallel such that a resumed run sums gradients in the same order."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from clusterddp.process import at_exit


def optimizers(parts: Mapping[str, Any]) -> dict[str, Any]:
    """The parts that are optimizers: torch's, and those of other libraries or the user.

    The latter step and zero gradients, or are called ``optimizer`` and step. Schedulers only step, and a module may
    have methods of any name.
    """
    return {name: part for name, part in parts.items() if isinstance(part, torch.optim.Optimizer) or _steps(name, part)}


def _steps(name: str, part: Any) -> bool:
    zeroes = hasattr(part, "zero_grad") and not isinstance(part, torch.nn.Module)
    return hasattr(part, "step") and (name == "optimizer" or zeroes)


def trained_parameters(optimizer: Any) -> set[torch.Tensor]:
    """All parameters of an optimizer. Empty if they are unknown, as in some other libraries."""
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


#: All DDP modules made here, and those whose buckets have their final order.
_made: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
_settled: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


class _SumOfParameters(torch.nn.Module):
    """Replaces the user's model: uses every parameter, but no batch and no buffer."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__()
        device = parameters[0].device if parameters else None  # they may be on several
        self._sums = lambda: [parameter.sum().abs().float().to(device) for parameter in parameters]

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._sums()).sum() * 0  # type: ignore[no-untyped-call]


def wrap(
    model: torch.nn.Module, devices: Sequence[torch.device], *, all_used_once: bool = False, **options: Any
) -> DistributedDataParallel:
    """The model in DDP, with its gradient buckets in their final order. It is moved to a single device.

    DDP rebuilds its buckets after the first iteration, in the order in which gradients arrived. A resumed run would do
    so after step S, sum step S in the old order, and differ from the uninterrupted run from there on (seen at 3 and
    more ranks). A throw-away pass fixes the order before the first step, on a fresh start and on a resume.

    With ``static_graph``, DDP learns from its first pass how often each parameter is used. After an artificial pass it
    rejects a model with unused parameters, and reduces the gradients of reentrant checkpointing too early (seen in
    torch 2.13: wrong gradients, no error). There is no throw-away pass then, and a resume is not exact at 3 and more
    ranks, unless ``all_used_once`` promises that every parameter gets its gradient in every backward, in one piece:
    then DDP counts in a first pass and takes the order from a second.

    If the promise is broken, DDP itself rejects an unused parameter in the second step, and a gradient in several
    pieces raises RuntimeError in the first backward. Raises TypeError for ``all_used_once`` without ``static_graph``.
    """
    _check_unwrapped(model)
    _check_trained(model)
    static_graph = options.get("static_graph", False)
    if all_used_once and not static_graph:
        raise TypeError("all_used_once=True requires static_graph=True. Without static_graph, a resume is exact anyway")
    if len(devices) == 1:
        model = model.to(devices[0])
        if devices[0].type == "cuda":
            options = {"device_ids": [devices[0].index], **options}
    wrapped = DistributedDataParallel(model, **options)
    if not _made:
        at_exit(_release_process_group)
    _made.add(wrapped)
    if all_used_once or not static_graph:
        _settle_buckets(wrapped, passes=2 if static_graph else 1)
        _settled.add(wrapped)
    if all_used_once:
        _check_first_backward(wrapped)
    return wrapped


def _check_unwrapped(model: torch.nn.Module) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"wrap() received a {type(model).__name__}, expected a torch.nn.Module")
    if ddp_modules(model):
        raise TypeError(
            f"wrap() received a {type(model).__name__} that is, or contains, a DDP module. Pass the bare model"
        )
    if _is_wrapped(model):
        gc.collect()  # the script may have dropped the wrapper
    if _is_wrapped(model):
        raise TypeError(f"this {type(model).__name__} is already wrapped. Use what the first wrap() returned")


def _check_trained(model: torch.nn.Module) -> None:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TypeError(
            f"wrap() received a {type(model).__name__} without a parameter that requires a gradient, but DDP is for "
            "models that train. Move this one to its device, as in teacher.to(ctx.device)"
        )


def _is_wrapped(model: torch.nn.Module) -> bool:
    return any(bare(wrapped) is bare(model) for wrapped in _made)


def doubt(wrapped: DistributedDataParallel) -> str | None:
    """Why a resume may sum gradients in a different order, at 3 and more ranks. None if it does not."""
    rebuilds = wrapped.static_graph or not wrapped.find_unused_parameters
    if wrapped in _settled or not rebuilds:
        return None
    if wrapped.static_graph:
        return "is wrapped in DDP with static_graph=True, without all_used_once=True"
    return "is wrapped in DDP, but not by ctx.wrap()"


def _release_process_group() -> None:
    """Drops the models' references to the process group at exit, before the context destroys it.

    A gloo thread takes the GIL to free its last work. After interpreter shutdown that aborts the process ("terminate
    called without an active exception"), so the group must be destroyed before. Its destructor joins the threads. If
    the last reference is a reducer's, the destructor runs with the GIL held and deadlocks. Both seen in torch 2.13.
    """
    for wrapped in list(_made):
        for owner in ("logger", "reducer", "process_group"):
            wrapped.__dict__.pop(owner, None)


def _settle_buckets(wrapped: DistributedDataParallel, passes: int) -> None:
    """Throw-away passes over all parameters, by which DDP orders its buckets, without other effects."""
    model, broadcast_buffers = wrapped.module, wrapped.broadcast_buffers
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    wrapped._modules["module"], wrapped.broadcast_buffers = _SumOfParameters(parameters), False
    try:
        for _ in range(passes):
            wrapped(torch.zeros(())).backward()  # with device_ids, DDP moves its inputs, and fails if there are none
    finally:
        wrapped._modules["module"], wrapped.broadcast_buffers = model, broadcast_buffers
    for parameter in parameters:
        parameter.grad = None


def _check_first_backward(wrapped: DistributedDataParallel) -> None:
    """Raises in the first backward if a parameter gets its gradient in pieces, of which DDP would reduce only the
    first."""
    seen: set[str] = set()

    def note(name: str, _: torch.Tensor) -> None:
        if name in seen:
            raise RuntimeError(
                f"wrap() received all_used_once=True, but {name} got its gradient in several pieces in one backward "
                "pass, as in reentrant checkpointing. Use checkpoint(..., use_reentrant=False), or omit all_used_once"
            )
        seen.add(name)

    def end(*_: Any) -> None:
        if seen:
            for handle in handles:
                handle.remove()

    handles = [
        parameter.register_post_accumulate_grad_hook(functools.partial(note, name))
        for name, parameter in wrapped.module.named_parameters()
        if parameter.requires_grad
    ]
    handles.append(wrapped.register_forward_pre_hook(end))
