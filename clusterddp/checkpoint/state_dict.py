"""The state of a run's parts: from ``state_dict()`` to JSON and named tensors, and back.

``with_state`` makes parts of random generators, because those of torch, numpy and ``random`` have no ``state_dict``.

``Blocks`` is the memory for the bytes of a checkpoint. Each large tensor has a separate block, so that a part can keep
it. Processes share memory through a file without a name.
"""

from __future__ import annotations

import base64
import errno
import math
import mmap
import os
import random
import sys
import tempfile
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from heapq import nlargest
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch

from clusterddp.checkpoint.file_format import Tensor
from clusterddp.distributed.wrapping import bare
from clusterddp.errors import CheckpointError
from clusterddp.reporter import say

#: Names in a checkpoint that are not parts.
RESERVED = {"format", "attempt", "parent", "progress"}
#: The dtypes that a checkpoint supports, and their names in safetensors.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
#: The names, dtypes and shapes of tensors.
Layout: TypeAlias = "tuple[list[str], list[torch.dtype], list[torch.Size]]"
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
_INTEGERS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}

#: Keys that torch's schedulers add to the groups of an optimizer.
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"}


class Stateful(Protocol):
    """Anything whose state can be saved and restored: a module, an optimizer, a scheduler, a scaler."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def check_parts(
    where: str, parts: Mapping[str, Any], remedy: str = "Wrap other values in a class with these methods"
) -> None:
    """Raises TypeError for a part without ``state_dict()`` and ``load_state_dict()``."""
    for name, part in parts.items():
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            given = repr(part) if isinstance(part, (bool, int, float)) else "..."
            raise TypeError(
                f"{where}({name}={given}): expected an object with state_dict() and load_state_dict(), got "
                f"{type(part).__name__}. {remedy}"
            )


def state_of(part: Stateful) -> dict[str, Any]:
    """A part's state. A module's has the names of the module without DDP and torch.compile around it.

    A module's state is an OrderedDict with the versions of its submodules in ``_metadata``, as in torch.
    """
    if not isinstance(part, torch.nn.Module):
        return _of_scaler(part) if isinstance(part, torch.amp.GradScaler) else part.state_dict()
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
    if not isinstance(part, torch.nn.Module):
        if isinstance(part, torch.optim.Optimizer):
            _check_kind(part, state)
            _load(part, _for_optimizer(part, state), recast)
        elif isinstance(part, torch.amp.GradScaler):
            plain = {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
            part.load_state_dict(plain)
        else:
            _load(part, placed(state, part.state_dict), recast)
        return
    module = bare(part)
    own = module.state_dict()
    names = {_bare_name(name): name for name in own}
    found: Any = OrderedDict((names.get(name, name), _own(name, value, own)) for name, value in state.items())
    if versions := _metadata(state):
        found._metadata = OrderedDict((name, versions.get(_bare_name(name), {})) for name in _metadata(own))
    module.load_state_dict(found)


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


def _own(name: str, value: Any, own: Mapping[str, Any]) -> Any:
    """A copy for a module, which copies its tensors itself, but keeps the values of ``get_extra_state``."""
    if not name.endswith(torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX):
        return value
    return placed({"state": value}, lambda: {"state": own.get(name)})["state"]


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


def _metadata(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The versions of a module's submodules by name. Empty if the state has none."""
    return getattr(state, "_metadata", None) or {}


def parameters_of(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """A module's parameters by their names in ``state_of``."""
    return {_bare_name(name): parameter for name, parameter in bare(module).named_parameters()}


def copied(state: Mapping[str, Any]) -> Any:
    """A copy of a state in which each tensor has its own memory. Tied tensors stay tied."""
    plain, tensors = pack(state)
    return unpack(plain, {name: tensor.clone() for name, tensor in tensors.items()})


def placed(state: Mapping[str, Any], present: Callable[[], Any], kept: Set[int] = frozenset()) -> Any:
    """``copied``, with each tensor on the device of the one at its place in the ``present`` state. If there is none, on
    the GPU that has the place of the one from which it was saved among the rank's GPUs.

    Tensors whose id is ``kept`` are not copied.
    """
    plain, tensors = pack(state)
    devices = _devices(present) if torch.cuda.is_initialized() else {}  # type: ignore[no-untyped-call]
    found = {}
    for name, tensor in tensors.items():
        device = devices.get(name) or _saved_device(tensor)
        if id(tensor) in kept or (device == tensor.device and take_over(tensor)):
            found[name] = tensor
        else:
            found[name] = tensor.to(device, copy=True)
    return unpack(plain, found)


def _devices(present: Callable[[], Any]) -> dict[str, torch.device]:
    try:
        return {name: tensor.device for name, tensor in pack(present())[1].items()}
    except Exception:  # the script's own code may expect to run only on rank 0
        return {}


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


def _parameters_in(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    """The keys of a state of this optimizer, each with its parameter, which torch finds by its place."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state.get("param_groups", ()) for number in group["params"]]
    return zip(numbers, parameters, strict=False)  # torch refuses a different number of them


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


def _load(part: Stateful, state: dict[str, Any], recast: Set[torch.Tensor]) -> None:
    """``load_state_dict`` of a part that is no module, with the saved dtypes in the optimizers of torch that it is or
    holds."""
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


def _bare_name(name: str) -> str:
    """The name of a tensor or submodule without the prefix of torch.compile."""
    return name.replace("_orig_mod.", "").removesuffix("_orig_mod").removesuffix(".")


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The content of a strided tensor as integers, on its device: to compare it bit for bit, NaN included."""
    values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return values.resolve_neg().contiguous().view(_INTEGERS[values.element_size()])


def tensor_facts(tensors: Mapping[str, torch.Tensor]) -> list[Tensor]:
    """The tensors' entries for a checkpoint's header."""
    return [
        Tensor(name, DTYPES[tensor.dtype], tuple(tensor.shape), tensor.element_size())
        for name, tensor in tensors.items()
    ]


def pack(content: Mapping[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """Converts a nested state to JSON and its tensors by name: their path in the state, such as ``model.fc.weight``.

    A tensor is replaced by ``{"$tensor": NAME}``, or by ``{"$tensor": [NAME, ORDER]}`` if its dimensions have a
    different order in memory (as with ``channels_last``), or by ``{"$tensor": [NAME, ORDER or None, GPU]}`` if it is on
    a GPU, whose number counts from the rank's first one. Tied weights are stored once. Values that JSON lacks become
    ``{"$KIND": ...}``. ``unpack`` is the inverse. The result shares no list or dict with the state. Raises
    CheckpointError for a value that could not be restored, such as an object of a user's class, because loading a
    checkpoint executes no code.
    """
    packed = Packed(content)
    return packed.plain(), {
        name: tensor.detach() if tensor.requires_grad else tensor for name, tensor in packed.tensors.items()
    }


def unpack(state: Any, tensors: Mapping[str, torch.Tensor], mark: bool = False) -> Any:
    """The inverse of ``pack``. ``mark``: tensors on the host know from which GPU they were saved."""
    return _unpack(state, dict(tensors), mark)


def _unpack(state: Any, tensors: dict[Any, torch.Tensor], mark: bool) -> Any:
    if isinstance(state, list):
        return [_unpack(entry, tensors, mark) for entry in state]
    if not isinstance(state, dict):
        return state
    if len(state) != 1 or not (name := next(iter(state))).startswith("$"):
        return {key: _unpack(entry, tensors, mark) for key, entry in state.items()}
    value = _unpack(state[name], tensors, mark)
    return _tensor(value, tensors, mark) if name == "$tensor" else _KINDS[name[1:]].from_plain(value)


def _tensor(value: Any, tensors: dict[Any, torch.Tensor], mark: bool) -> torch.Tensor:
    """The tensor of this name, or, for a name and an order of dimensions, with that order in memory."""
    if isinstance(value, str):
        return tensors[value]
    name, order, *gpu = value
    found = tensors[name]
    if order is not None:
        key = name, tuple(order)
        if key not in tensors:
            back = [order.index(dimension) for dimension in range(len(order))]
            tensors[key] = found.permute(order).contiguous().permute(back)
        found = tensors[key]
    if gpu and mark:
        setattr(found, _SAVED_FROM, int(*gpu))
    return found


def _gpu_of(tensor: torch.Tensor) -> int | None:
    """The GPU that the tensor is on, or was saved from, counted from the rank's first one. None for a CPU."""
    if not tensor.is_cuda:
        return getattr(tensor, _SAVED_FROM, None)
    return int(tensor.device.index - torch.cuda.current_device())


def _saved_device(tensor: torch.Tensor) -> torch.device:
    """The device of this rank for a tensor of which the part has none at present."""
    gpu = getattr(tensor, _SAVED_FROM, None)
    if gpu is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return tensor.device
    first = torch.cuda.current_device()
    return torch.device("cuda", first + gpu if 0 <= first + gpu < torch.cuda.device_count() else first)


class _Kind:
    """A type that JSON lacks, and its conversion to plain values and back."""

    def __init__(
        self, of: type, to_plain: Callable[[Any], Any] = list, from_plain: Callable[[Any], Any] | None = None
    ) -> None:
        self.type, self.to_plain, self.from_plain = of, to_plain, from_plain or of


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise LookupError(f"torch.{name} is not a dtype")
    return found


def _pairs(mapping: Mapping[Any, Any]) -> list[list[Any]]:
    return [[key, value] for key, value in mapping.items()]


def _versions(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A module state's ``_metadata`` in short, as nearly all submodules have only a version."""
    return {
        name: facts["version"] if len(facts) == 1 and "version" in facts else facts for name, facts in metadata.items()
    }


def _module_state(parts: list[Any]) -> Any:
    state: Any = OrderedDict(parts[0])
    state._metadata = OrderedDict(
        (name, facts if isinstance(facts, dict) else {"version": facts}) for name, facts in parts[1].items()
    )
    return state


def _numpy_scalar(pair: list[Any]) -> Any:
    import numpy

    name, value = pair
    if name not in _NUMPY_SCALARS:
        raise LookupError(f"expected one of {', '.join(_NUMPY_SCALARS)}, got numpy.{name}")
    return numpy.dtype(name).type(value)


#: The numpy scalars that Python numbers represent exactly.
_NUMPY_SCALARS = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
#: Python refuses to write longer integers in decimal.
_LONGEST_INT_BITS = 4096

_KINDS = {
    "float": _Kind(float, to_plain=str),
    "int": _Kind(int, to_plain=hex, from_plain=lambda text: int(text, 16)),
    "tuple": _Kind(tuple),
    "size": _Kind(torch.Size),
    "dict": _Kind(dict, to_plain=_pairs),
    "ordered": _Kind(OrderedDict, to_plain=_pairs),
    "counter": _Kind(Counter, to_plain=_pairs, from_plain=lambda pairs: Counter(dict(pairs))),
    "set": _Kind(set),
    "bytes": _Kind(bytes, to_plain=lambda data: base64.b64encode(data).decode(), from_plain=base64.b64decode),
    "dtype": _Kind(torch.dtype, to_plain=lambda dtype: str(dtype).removeprefix("torch."), from_plain=_dtype),
}
_NAME_OF = {kind.type: name for name, kind in _KINDS.items()}
_KINDS |= {
    "module": _Kind(OrderedDict, from_plain=_module_state),
    "numpy": _Kind(object, from_plain=_numpy_scalar),
    "ndarray": _Kind(object, from_plain=lambda tensor: tensor.numpy()),
}


class Packed:
    """What ``pack`` returns, and what a save needs besides.

    Training waits while a save makes one. So all tensors are collected first, and each of their attributes is then read
    in one ``map``, which takes 50 ns per tensor.
    """

    def __init__(self, content: Any) -> None:
        #: For each place in the state that has a tensor: the tensor, and its name, which is at first its path.
        self._found: list[torch.Tensor] = []
        self._names: list[Any] = []
        #: The dicts that still have tensors where their JSON form has names, and the place of the first one.
        self._forms: list[tuple[dict[str, Any], int]] = []
        try:
            self._plain = self._walk(content, "")
        except RecursionError:
            raise CheckpointError("the state is nested too deeply, or contains itself") from None
        found = self._found
        dtypes, shapes, addresses = self._attributes()
        self.tensors = dict(zip(self._names, found, strict=True))
        kept: Sequence[int] = range(len(found))
        if min(len(self.tensors), len(set(addresses))) < len(found) or not self.tensors.keys().isdisjoint(_TAKEN):
            kept = self._name(addresses)
        as_in_file = all(map(torch.Tensor.is_contiguous, found)) and not any(map(torch.Tensor.is_neg, found))
        if not as_in_file or torch.complex64 in dtypes:
            for place, tensor in enumerate(found):
                if not tensor.is_contiguous():
                    self._names[place] = [self._names[place], _order(tensor)]
                if not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
                    addresses[place] = 0
        if len(kept) < len(found):
            dtypes, shapes = [dtypes[place] for place in kept], [shapes[place] for place in kept]
            addresses = [addresses[place] for place in kept]
        #: All that the order and the size of the data in a file depend on.
        self.layout: Layout = list(self.tensors), dtypes, shapes
        #: The address of each tensor's bytes, or 0 if the file has different bytes, as for a transposed tensor.
        self.addresses = addresses

    def plain(self) -> Any:
        """The state as JSON values. Training does not wait until they are complete."""
        names = list(self._names)
        for place, gpu in enumerate(map(_gpu_of, self._found)):
            if gpu is not None:
                name, order = names[place] if isinstance(names[place], list) else (names[place], None)
                names[place] = [name, order, gpu]
        for form, first in self._forms:
            if "$tensor" in form:
                form["$tensor"] = names[first]
            else:
                for place, key in enumerate(form, first):
                    form[key] = {"$tensor": names[place]}
        return self._plain

    def _walk(self, item: Any, path: str) -> Any:
        """The JSON form of the value at ``path``, which ``plain`` completes."""
        kind = type(item)
        if kind in _PLAIN_TENSORS:
            form = {"$tensor": item}
            self._forms.append((form, len(self._found)))
            self._found.append(item)
            self._names.append(path)
            return form
        if item is None or kind is bool or kind is str:
            return item
        if kind is int and item.bit_length() < _LONGEST_INT_BITS:
            return item
        if kind is float and math.isfinite(item):
            return item
        if kind is list:
            if _is_plain_list(item):
                return item[:]
            return [self._walk(entry, below(path, number)) for number, entry in enumerate(item)]
        if kind is dict and set(map(type, item)) <= {str} and not _looks_special(item):
            values = list(item.values())
            if _is_plain_list(values):
                return item.copy()
            if set(map(type, values)) <= _PLAIN_TENSORS:
                form = item.copy()
                self._forms.append((form, len(self._found)))
                self._found += values
                self._names += [f"{path}.{key}" for key in item] if path else item
                return form
            return {key: self._walk(entry, below(path, key)) for key, entry in item.items()}
        if kind is OrderedDict and hasattr(item, "_metadata"):
            return {"$module": [self._walk(dict(item.items()), path), self._walk(_versions(item._metadata), path)]}
        if kind in _NAME_OF:
            plain = _KINDS[_NAME_OF[kind]].to_plain(item)
            return {f"${_NAME_OF[kind]}": (self._members if isinstance(item, dict) else self._walk)(plain, path)}
        if kind.__module__ == "numpy" and (found := self._numpy(item, path)) is not None:
            return found
        if isinstance(item, torch.Tensor):
            raise CheckpointError(
                f"cannot save the state of {path!r}, which is of type {kind.__module__}.{kind.__qualname__}: a "
                "subclass of torch.Tensor would be restored as a plain tensor. Convert it in state_dict(), and back in "
                "load_state_dict()"
            )
        raise CheckpointError(
            f"cannot save the state of {path!r}, which is of type {kind.__module__}.{kind.__qualname__}: expected "
            "tensors, numpy arrays and scalars, numbers, text, bytes, None, and lists, tuples, sets and dicts of them. "
            "Convert it in state_dict(), and back in load_state_dict()"
        )

    def _members(self, pairs: list[list[Any]], path: str) -> Any:
        return [[self._walk(key, path), self._walk(value, below(path, key))] for key, value in pairs]

    def _numpy(self, item: Any, path: str) -> Any:
        """The JSON form of a numpy array or scalar. None if it could not be restored exactly."""
        import numpy

        if isinstance(item, numpy.generic):
            return {"$numpy": [item.dtype.name, self._walk(item.item(), path)]} if _is_plain(item.dtype) else None
        if type(item) is not numpy.ndarray or not _is_plain(item.dtype):
            return None
        if not (item.flags.c_contiguous and item.flags.writeable):
            item = numpy.array(item, order="C")  # as torch.from_numpy requires
        return {"$ndarray": self._walk(torch.from_numpy(item), path)}

    def _attributes(self) -> tuple[list[torch.dtype], list[torch.Size], list[int]]:
        """The dtype, shape and address of each tensor. Raises CheckpointError if one cannot be saved."""
        found = self._found
        try:
            dtypes, shapes = list(map(attrgetter("dtype"), found)), list(map(attrgetter("shape"), found))
            addresses = list(map(torch.Tensor.data_ptr, found))
        except RuntimeError:  # of a nested or sparse tensor
            self._check()
            raise
        if 0 in addresses or not set(dtypes) <= DTYPES.keys():  # 0 for an empty tensor, or one on "meta"
            self._check()
        return dtypes, shapes, addresses

    def _check(self) -> None:
        """Raises CheckpointError for a tensor that cannot be saved."""
        for tensor, path in zip(self._found, self._names, strict=True):
            if tensor.is_nested or tensor.dtype not in DTYPES or tensor.layout is not torch.strided or tensor.is_meta:
                nested = "nested, " if tensor.is_nested else ""
                raise CheckpointError(
                    f"cannot save the state of {path!r}, a tensor ({nested}{tensor.dtype}, {tensor.layout}, on "
                    f"{tensor.device}): expected a dense tensor of dtype "
                    + ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in DTYPES))
                )

    def _name(self, addresses: list[int]) -> list[int]:
        """Names the tensors if some are the same, or have the same path. Returns the places of the different ones."""
        self.tensors, kept = {}, []
        names: dict[object, str] = {}
        often = Counter(addresses)
        for place, (tensor, path, address) in enumerate(zip(self._found, self._names, addresses, strict=True)):
            view = _view(tensor) if often[address] > 1 else address
            if view not in names:
                name, number = path, 2
                while name in self.tensors or name in _TAKEN:
                    name, number = f"{path}#{number}", number + 1
                self.tensors[name], names[view] = tensor, name
                kept.append(place)
            self._names[place] = names[view]
        return kept


#: A ``torch.nn.Buffer`` is of the first type.
_PLAIN_TENSORS = {torch.Tensor, torch.nn.Parameter}


def _is_plain(dtype: Any) -> bool:
    """Whether values of this numpy dtype can be restored exactly from Python numbers or a tensor."""
    return dtype.name in _NUMPY_SCALARS and dtype.isnative


def _order(tensor: torch.Tensor) -> list[int]:
    """The dimensions by their order in memory, the outermost first."""
    return sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)


def _view(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for two tensors that have the same values at the same positions, because they share memory."""
    place = tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()
    return *place, tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _looks_special(item: dict[str, Any]) -> bool:
    """Whether a key begins like that of a kind, such as ``$tensor``."""
    return "$" in "".join(item) and "$" in [key[:1] for key in item]


def _is_plain_list(items: list[Any]) -> bool:
    """Whether these are only texts, flags and ordinary integers, such as the numbers of an optimizer's parameters."""
    kinds = set(map(type, items))
    if not kinds <= {str, bool, int, type(None)}:
        return False
    numbers = [item for item in items if type(item) is int] if kinds - {int} else items
    return max(map(int.bit_length, numbers), default=0) < _LONGEST_INT_BITS


#: Names that the format of the file reserves.
_TAKEN = {"checksums", "__metadata__"}


def below(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


class GeneratorPart:
    """A generator with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, generator: Any, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        self.generator, self._get, self._put = generator, get, put

    def state_dict(self) -> dict[str, Any]:
        """The generator's state."""
        return {"state": self._get()}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """The inverse."""
        self._put(state["state"])


def with_state(part: Any) -> Any:
    """A part for a ``torch.Generator``, a numpy ``Generator`` or ``RandomState``, or a ``random.Random``. Other parts
    are returned as they are."""
    numpy = sys.modules.get("numpy")
    if isinstance(part, torch.Generator):
        return GeneratorPart(part, part.get_state, part.set_state)
    if isinstance(part, random.Random):
        return GeneratorPart(part, part.getstate, part.setstate)
    if numpy is not None and isinstance(part, numpy.random.Generator):
        bits = part.bit_generator
        return GeneratorPart(part, lambda: bits.state, lambda state: setattr(bits, "state", state))
    if numpy is not None and isinstance(part, numpy.random.RandomState):
        return GeneratorPart(part, lambda: part.get_state(legacy=False), part.set_state)
    return part


#: Bytes of the smallest tensor with its own block. Copies of smaller ones cost little.
LARGE = 1 << 16
#: The most blocks, for the largest tensors, because a process may have 65,530 mappings (``vm.max_map_count``).
MOST = 1 << 12
#: An attribute of a tensor, because the tensor passes through ``load_state_dict`` methods of torch and of the script,
#: which pass on only tensors. A copy that one of them makes lacks the attribute.
_OFFERED = "_clusterddp_offered"
#: The same, of a tensor in a checkpoint's content: the GPU that it was saved from.
_SAVED_FROM = "_clusterddp_saved_from"


class Blocks:
    """``size`` bytes, cut at both ends of each large span (start, stop). A block is freed once it is unused."""

    def __init__(self, spans: Iterable[tuple[int, int]], size: int, allocate: Callable[[int], mmap.mmap]) -> None:
        large = nlargest(MOST, (span for span in spans if span[1] - span[0] >= LARGE), lambda span: span[1] - span[0])
        cuts = sorted({0, size, *(end for span in large for end in span)})
        self._starts = cuts[:-1] or [0]
        self._blocks = [memoryview(allocate(stop - start)) for start, stop in pairwise(cuts)]
        self._large = set(large)

    def views(self, start: int, stop: int) -> Iterator[memoryview]:
        """The memory of these bytes, in order."""
        number = bisect_right(self._starts, start) - 1
        while start < stop:
            block, first = self._blocks[number], self._starts[number]
            view = block[start - first : stop - first]
            yield view
            start, number = start + len(view), number + 1

    def bytes_of(self, start: int, stop: int) -> tuple[torch.Tensor, bool]:
        """These bytes as a tensor, and whether no other tensor shares them."""
        views = list(self.views(start, stop))
        if len(views) != 1:  # it overlaps with another one, in a different program's file
            return torch.frombuffer(bytearray().join(views), dtype=torch.uint8), True
        alone = (start, stop) in self._large and len(views[0]) == stop - start
        self._large.discard((start, stop))
        return torch.frombuffer(views[0], dtype=torch.uint8), alone


def offer(tensor: torch.Tensor) -> None:
    """Lets a part keep this tensor, whose memory has no other user."""
    setattr(tensor, _OFFERED, True)


def take_over(tensor: torch.Tensor) -> bool:
    """Whether a part may keep the tensor instead of a copy. Only the first caller may."""
    if not getattr(tensor, _OFFERED, False):
        return False
    delattr(tensor, _OFFERED)
    vars(tensor).pop(_SAVED_FROM, None)
    return True


SHARED_MEMORY = Path("/dev/shm")


def anonymous_file(purpose: str, size: int, folders: Sequence[Path] = ()) -> tuple[int, str]:
    """A memfd, else an unlinked file in /dev/shm, else in one of ``folders``: its descriptor and a description.

    An unlinked file already has ``size`` bytes, a memfd none. A memfd does not count towards the limit of /dev/shm, and
    none of these outlives its processes. Raises CheckpointError if no place has room.
    """
    try:
        return _memfd("clusterddp"), "a memfd"
    except OSError as error:
        reasons = [f"memfd_create: {error.strerror}"]
    for place in (SHARED_MEMORY, *folders):
        try:
            with tempfile.TemporaryFile(dir=place, buffering=0) as file:
                os.posix_fallocate(file.fileno(), 0, max(size, 1))
                found = os.dup(file.fileno())
        except OSError as error:
            reasons.append(f"{place}: {error.strerror}")
        else:
            used = f"an unlinked file in {place}"
            say(f"{purpose} is {used} ({', '.join(reasons)})")
            return found, used
    raise CheckpointError(f"could not allocate shared memory for {purpose}: {', '.join(reasons)}")


def _memfd(name: str) -> int:
    """``os.memfd_create``, also for a Python that was built on a system without it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    import ctypes

    call = getattr(ctypes.CDLL(None, use_errno=True), "memfd_create", None)
    descriptor = call(name.encode(), 1) if call else -1  # MFD_CLOEXEC
    if descriptor < 0:
        number = ctypes.get_errno() if call else errno.ENOSYS
        raise OSError(number, os.strerror(number))
    return int(descriptor)


#: A limit of a cgroup and the bytes that count towards it. Above ``memory.high``, the kernel slows every allocation
#: down, so that a rank hardly moves. ``memsw`` also counts what is swapped out.
CGROUP_V1 = (
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"),
)
CGROUP_V2 = (("memory.max", "memory.current"), ("memory.high", "memory.current"))
#: What the kernel frees when a cgroup reaches its limit, by the names of cgroup v2.
_RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")


def free_memory() -> int:
    """Bytes that this process can still allocate: the machine's available memory, limited by its cgroups."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, name = line.split(":", 2)
        if number == "0":
            free = min(free, left_in_cgroups(Path("/sys/fs/cgroup"), name, CGROUP_V2))
        elif "memory" in controllers.split(","):
            free = min(free, left_in_cgroups(Path("/sys/fs/cgroup/memory"), name, CGROUP_V1))
    return free


def left_in_cgroups(root: Path, name: str, limits: Sequence[tuple[str, str]]) -> int:
    """The bytes that a cgroup and its parents still allow, where the page cache counts as free."""
    left = 1 << 62
    folder = root / name.lstrip("/")
    while folder != root.parent:
        for limit, used in limits:
            with suppress(OSError):  # the root has no limits, and a container may hide the host's names
                if (most := (folder / limit).read_text().strip()) != "max":
                    left = min(left, int(most) - int((folder / used).read_text()) + _reclaimable(folder))
        folder = folder.parent
    return max(0, left)


def _reclaimable(folder: Path) -> int:
    """The bytes of a cgroup and those below it that the kernel frees when it needs them.

    In v2 every figure is of all of them. In v1 only those that begin with ``total_`` are, and Slurm's tasks are below
    job that has the limit.
    """
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return sum(int(stat.get(f"total_{kind}", stat.get(kind, 0))) for kind in _RECLAIMABLE)
