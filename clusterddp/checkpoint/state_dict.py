"""The state of a part: from ``state_dict()``, with the names that a checkpoint has, and back into the part."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Set
from typing import Any

import torch

from clusterddp.checkpoint.optimizer_state import load_optimizer, load_with_dtypes
from clusterddp.checkpoint.packing import pack
from clusterddp.checkpoint.parts import Stateful
from clusterddp.checkpoint.state_copies import placed
from clusterddp.distributed.wrapping import bare


def state_of(part: Stateful) -> dict[str, Any]:
    """A part's state. A module's has the names of the module without DDP and torch.compile around it.

    A module's state is an OrderedDict with the versions of its submodules in ``_metadata``, as in torch.
    """
    if isinstance(part, torch.amp.GradScaler):
        return _of_scaler(part)
    if not isinstance(part, torch.nn.Module):
        return part.state_dict()
    found = bare(part).state_dict()
    if type(found) is OrderedDict and "_orig_mod" not in "\n".join([*found, *_metadata(found)]):
        return found  # the usual case, and a large module has thousands of names
    state: Any = OrderedDict((_bare_name(name), value) for name, value in found.items())
    state._metadata = OrderedDict((_bare_name(name), facts) for name, facts in _metadata(found).items())
    return state  # type: ignore[no-any-return]


def load_state(part: Stateful, state: Mapping[str, Any], recast: Set[torch.Tensor] = frozenset()) -> None:
    """The inverse of ``state_of``. The part gets copies, because the tensors of ``state`` may share memory.

    The tensors of an optimizer keep their saved dtypes, except those of parameters in ``recast``, which get the dtype
    of the parameter, as in torch.
    """
    if isinstance(part, torch.nn.Module):
        _load_module(bare(part), state)
    elif isinstance(part, torch.optim.Optimizer):
        load_optimizer(part, state, recast)
    elif isinstance(part, torch.amp.GradScaler):
        plain = {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
        part.load_state_dict(plain)
    else:
        load_with_dtypes(part, placed(state, part.state_dict), recast)


def parameters_of(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """A module's parameters by their names in ``state_of``."""
    return {_bare_name(name): parameter for name, parameter in bare(module).named_parameters()}


def recast_parameters(parts: Mapping[str, Any], states: Mapping[str, Any]) -> set[torch.Tensor]:
    """The modules' parameters whose dtype is not the one in these states, because the script has changed it."""
    return {
        parameter
        for name, part in parts.items()
        if isinstance(part, torch.nn.Module) and name in states
        for key, parameter in parameters_of(part).items()
        if isinstance(saved := states[name].get(key), torch.Tensor) and saved.dtype != parameter.dtype
    }


def changed_dtypes(part: Stateful, state: Mapping[str, Any]) -> list[str]:
    """The names of the tensors whose dtype in the part is not the one in ``state``."""
    (_, saved), (_, own) = pack(state), pack(state_of(part))
    return [name for name, tensor in saved.items() if name in own and own[name].dtype != tensor.dtype]


def _of_scaler(scaler: torch.amp.GradScaler) -> dict[str, Any]:
    """The scaler's state. Numbers on a GPU stay tensors, because reading them would wait for the GPU."""
    if not scaler.is_enabled():
        return scaler.state_dict()
    scale, growth = scaler._scale, scaler._growth_tracker
    if scale is None or growth is None or scale.device.type == "cpu":
        return scaler.state_dict()
    factors = {
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
    }
    return {"scale": scale, **factors, "_growth_tracker": growth}


def _load_module(module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    present = module.state_dict()
    names = {_bare_name(name): name for name in present}
    renamed: Any = OrderedDict()
    for name, value in state.items():
        renamed[names.get(name, name)] = _for_module(name, value, present)
    if versions := _metadata(state):
        renamed._metadata = OrderedDict((name, versions.get(_bare_name(name), {})) for name in _metadata(present))
    module.load_state_dict(renamed)


def _for_module(name: str, value: Any, present: Mapping[str, Any]) -> Any:
    """A copy for a module, which copies its tensors itself, but keeps the values of ``get_extra_state``."""
    if not name.endswith(torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX):
        return value
    return placed({"state": value}, lambda: {"state": present.get(name)})["state"]


def _metadata(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The versions of a module's submodules by name. Empty if the state has none."""
    return getattr(state, "_metadata", None) or {}


def _bare_name(name: str) -> str:
    """The name of a tensor or submodule without the prefix of torch.compile."""
    return name.replace("_orig_mod.", "").removesuffix("_orig_mod").removesuffix(".")
