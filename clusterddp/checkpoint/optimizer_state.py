"""Loads the state of an optimizer without what torch's ``load_state_dict`` adds: changed dtypes and needless copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch

from clusterddp.checkpoint.parts import Stateful
from clusterddp.checkpoint.state_copies import placed

#: Keys that torch's schedulers add to the groups of an optimizer.
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"}


def load_optimizer(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any], recast: Set[torch.Tensor] = frozenset()
) -> None:
    """Loads the state into this optimizer. ``recast``: see ``load_with_dtypes``.

    Raises ValueError for the state of a different kind of optimizer.
    """
    _check_kind(optimizer, state)
    load_with_dtypes(optimizer, _for_optimizer(optimizer, state), recast)


def load_with_dtypes(part: Stateful, state: dict[str, Any], recast: Set[torch.Tensor]) -> None:
    """``load_state_dict`` of a part that is no module, with the saved dtypes in the optimizers of torch that it is or
    holds. Those of parameters in ``recast`` get the dtype of the parameter, as in torch."""
    loaded: dict[torch.optim.Optimizer, Mapping[str, Any]] = {}
    handles = [
        optimizer.register_load_state_dict_pre_hook(loaded.__setitem__)
        for optimizer in _held_optimizers(part)
        if hasattr(optimizer, "_optimizer_load_state_dict_pre_hooks")  # accelerate's does not have it
    ]
    try:
        part.load_state_dict(state)
    finally:
        for handle in handles:
            handle.remove()
    if isinstance(part, torch.optim.Optimizer):
        loaded[part] = state
    for optimizer, own in loaded.items():
        _restore_dtypes(optimizer, own, recast)


def _check_kind(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Raises ValueError for the state of a different kind of optimizer, which torch would load, with its
    hyperparameters.

    A different version of torch may have one option more or less, so kinds differ in at least two options on both
    sides.
    """
    groups = state.get("param_groups") or [{}], optimizer.param_groups or [{}]
    saved, own = (set(first) - _OF_SCHEDULERS for first, *_ in groups)
    if min(len(saved - own), len(own - saved)) > 1:
        raise ValueError(
            f"it has the state of an optimizer with {', '.join(sorted(saved - own))}, but "
            f"{type(optimizer).__name__} has {', '.join(sorted(own - saved))}"
        )


def _for_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> Any:
    """``placed``, except tensors in their own blocks, and those that the optimizer copies to a device.

    With clones of these, the host would hold the whole state once more for each of its ranks.
    """
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return placed(state, lambda: {"param_groups": groups}, _copied_to_devices(optimizer, state))


def _copied_to_devices(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> set[int]:
    """The ids of the tensors that torch's ``load_state_dict`` copies to the devices of their parameters."""
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return set()
    return {
        id(value)
        for number, parameter in _parameters_in(optimizer, state)
        if parameter.device.type != "cpu"
        for name, value in state["state"].get(number, {}).items()
        if isinstance(value, torch.Tensor) and name != "step"  # which mostly stays where it is
    }


def _held_optimizers(part: Any) -> list[torch.optim.Optimizer]:
    """The optimizers of torch among a part's attributes, and in their lists and dicts."""
    found: dict[torch.optim.Optimizer, None] = {}
    for value in getattr(part, "__dict__", {}).values():
        members = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        found |= dict.fromkeys(one for one in members if isinstance(one, torch.optim.Optimizer))
    return list(found)


def _restore_dtypes(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], recast: Set[torch.Tensor]) -> None:
    """Replaces tensors whose dtype ``load_state_dict`` has changed by those of ``state``, on the same device.

    torch casts the whole state of a parameter, except ``step``, to the parameter's dtype. Moments in float32 of
    parameters in bfloat16 would lose bits.
    """
    state_of_all, shown = optimizer.state, None
    for number, parameter in _parameters_in(optimizer, state):
        saved = state.get("state", {}).get(number)
        now = state_of_all.get(parameter)
        if not isinstance(saved, dict) or not isinstance(now, dict) or parameter in recast:
            continue
        for name in saved.keys() & now.keys():
            restored = _as_saved(saved[name], now[name])
            if restored is now[name]:
                continue
            if shown is None:
                shown = _shown(optimizer)
            seen = shown.get(number, {}).get(name)
            if seen is now[name] or _as_saved(saved[name], seen) is not seen:  # else its state_dict converts them
                now[name] = restored


def _as_saved(saved: Any, now: Any) -> Any:
    """``now`` with the saved tensors where dtypes differ. ``now`` itself if none does."""
    if isinstance(saved, torch.Tensor) and isinstance(now, torch.Tensor):
        return now if saved.dtype == now.dtype else saved.to(now.device)
    if isinstance(saved, dict) and isinstance(now, dict) and saved.keys() == now.keys():
        found = {key: _as_saved(saved[key], value) for key, value in now.items()}
        return now if all(found[key] is value for key, value in now.items()) else found
    if isinstance(saved, (list, tuple)) and isinstance(now, (list, tuple)) and len(saved) == len(now):
        entries = [_as_saved(*both) for both in zip(saved, now, strict=True)]
        return now if all(one is other for one, other in zip(entries, now, strict=True)) else type(now)(entries)
    return now


def _shown(optimizer: torch.optim.Optimizer) -> Mapping[Any, Any]:
    """The state of each parameter in the optimizer's ``state_dict``."""
    try:
        return optimizer.state_dict()["state"]  # type: ignore[no-any-return]
    except RuntimeError:  # a ZeroRedundancyOptimizer before it is consolidated. It keeps dtypes itself.
        return {}


def _parameters_in(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    """The keys of a state of this optimizer, each with its parameter, which torch finds by its place."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state.get("param_groups", ()) for number in group["params"]]
    return zip(numbers, parameters, strict=False)  # torch refuses a different number of them
