"""The state of a run's parts: under the bare model's names, and as plain values and tensors by name."""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from clusterddp.archive import Tensor
from clusterddp.errors import CheckpointError

#: The dtypes that a checkpoint holds, and their names in safetensors.
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
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


class Stateful(Protocol):
    """Anything whose state is saved and restored: a module, an optimizer, a scheduler, a scaler."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def state_of(part: Stateful) -> dict[str, Any]:
    """A part's state; a module's under the names it has without DDP and torch.compile around it."""
    if not isinstance(part, torch.nn.Module):
        return part.state_dict()
    return {_bare_name(name): value for name, value in bare(part).state_dict().items()}


def load_state(part: Stateful, state: Mapping[str, Any]) -> None:
    """The inverse of ``state_of``. The part keeps no tensor of ``state``, all of which may be one piece of memory."""
    if not isinstance(part, torch.nn.Module):
        part.load_state_dict(copied(state))
        return
    module = bare(part)
    names = {_bare_name(name): name for name in module.state_dict()}
    module.load_state_dict({names.get(name, name): value for name, value in state.items()})


def parameters_of(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """A module's parameters under the names they have in ``state_of``."""
    return {_bare_name(name): parameter for name, parameter in bare(module).named_parameters()}


def copied(state: Mapping[str, Any]) -> Any:
    """The same state, with memory of its own for each tensor; tied ones stay tied."""
    plain, tensors = pack(state)
    return unpack(plain, {name: tensor.clone() for name, tensor in tensors.items()})


def bare(module: Any) -> torch.nn.Module:
    """The user's own module, inside DDP and torch.compile."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif hasattr(module, "_orig_mod"):
            module = module._orig_mod
        else:
            result: torch.nn.Module = module
            return result


def _bare_name(name: str) -> str:
    return name.replace("_orig_mod.", "")


def tensor_facts(tensors: Mapping[str, torch.Tensor]) -> list[Tensor]:
    """What a checkpoint's header says of tensors."""
    return [
        Tensor(name, DTYPES[tensor.dtype], tuple(tensor.shape), tensor.element_size())
        for name, tensor in tensors.items()
    ]


def pack(content: Mapping[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """A nested state as JSON has it, and its tensors by name: their place in the state, such as ``model.fc.weight``.

    In a tensor's place stands ``{"$tensor": NAME}``. A tensor that occurs twice, as tied weights do, is there once.
    What JSON lacks is written as ``{"$KIND": ...}``; ``unpack`` is the inverse. The result shares no list and no dict
    with the state. Raises CheckpointError for what has no such form: nothing in a checkpoint is ever executed.
    """
    packing = _Packing()
    return packing.walk(content, ""), packing.tensors


def unpack(state: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of ``pack``."""
    if isinstance(state, list):
        return [unpack(entry, tensors) for entry in state]
    if not isinstance(state, dict):
        return state
    if len(state) != 1 or not (name := next(iter(state))).startswith("$"):
        return {key: unpack(entry, tensors) for key, entry in state.items()}
    value = unpack(state[name], tensors)
    return tensors[value] if name == "$tensor" else _KINDS[name[1:]].from_plain(value)


class _Kind:
    """Values that JSON lacks: their types, and the way to plain values and back."""

    def __init__(
        self, *types: type, to_plain: Callable[[Any], Any] = list, from_plain: Callable[[Any], Any] | None = None
    ) -> None:
        self.types, self.to_plain, self.from_plain = types, to_plain, from_plain or types[0]


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch.{name} is no dtype")
    return found


def _narrow(pair: list[Any]) -> Any:
    import numpy

    name, value = pair
    if name not in _NARROW:
        raise ValueError(f"numpy.{name} is none of {', '.join(_NARROW)}")
    return numpy.dtype(name).type(value)


def _pairs(mapping: Mapping[Any, Any]) -> list[list[Any]]:
    return [[key, value] for key, value in mapping.items()]


#: numpy's floats that round otherwise than Python's: they come back as what they were.
_NARROW = ("float16", "float32")

_KINDS = {
    "float": _Kind(float, to_plain=str),
    "tuple": _Kind(tuple, torch.Size),
    "dict": _Kind(dict, to_plain=_pairs),
    "ordered": _Kind(OrderedDict, to_plain=_pairs),
    "counter": _Kind(Counter, to_plain=_pairs, from_plain=lambda pairs: Counter(dict(pairs))),
    "set": _Kind(set),
    "bytes": _Kind(bytes, to_plain=lambda data: base64.b64encode(data).decode(), from_plain=base64.b64decode),
    "numpy": _Kind(from_plain=_narrow),
    "dtype": _Kind(torch.dtype, to_plain=lambda dtype: str(dtype).removeprefix("torch."), from_plain=_dtype),
}


class _Packing:
    """One walk through a state."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        #: By address: most tensors are alone at theirs.
        self._found: dict[int, list[tuple[torch.Tensor, str]]] = {}

    def walk(self, item: Any, path: str) -> Any:
        """The JSON form of what stands at ``path``. Training waits for it, at each save."""
        if isinstance(item, torch.Tensor):
            return {"$tensor": self._name(item, path)}
        if item is None or isinstance(item, (bool, str)):
            return item
        if isinstance(item, int):
            return int(item)
        if isinstance(item, float) and math.isfinite(item):
            return float(item)
        if type(item) is list:
            return [self.walk(entry, _below(path, number)) for number, entry in enumerate(item)]
        if type(item) is dict and set(map(type, item)) <= {str} and "$" not in [key[:1] for key in item]:
            return {key: self.walk(entry, _below(path, key)) for key, entry in item.items()}
        if type(item).__module__ == "numpy" and getattr(item, "shape", None) == () and item.itemsize <= 8:
            value = self.walk(item.item(), path)  # a scalar, as metrics often are
            return {"$numpy": [item.dtype.name, value]} if item.dtype.name in _NARROW else value
        for name, kind in _KINDS.items():
            if type(item) in kind.types or (kind.types == (float,) and isinstance(item, float)):
                return {f"${name}": self._members(kind.to_plain(item), path, by_key=kind.to_plain is _pairs)}
        raise CheckpointError(
            f"the state of {path!r} is a {type(item).__module__}.{type(item).__qualname__}, which a checkpoint "
            "does not hold: expected tensors, numbers, text, bytes, None, and lists, tuples, sets and dicts of them"
        )

    def _members(self, plain: Any, path: str, by_key: bool) -> Any:
        if not by_key:
            return self.walk(plain, path)
        return [[self.walk(key, path), self.walk(value, _below(path, key))] for key, value in plain]

    def _name(self, tensor: torch.Tensor, path: str) -> str:
        if tensor.dtype not in DTYPES or tensor.layout is not torch.strided or tensor.is_meta:
            what = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
            raise CheckpointError(
                f"the state of {path!r} is a tensor that a checkpoint does not hold ({what}): expected a dense "
                f"one of {', '.join(sorted(str(dtype).removeprefix('torch.') for dtype in DTYPES))}"
            )
        at_its_place = self._found.setdefault(tensor.data_ptr(), [])
        for other, name in at_its_place:
            if _identity(other) == _identity(tensor) and tensor.numel():
                return name
        name, number = path, 2
        while name in self.tensors or name in _TAKEN:
            name, number = f"{path}#{number}", number + 1
        self.tensors[name] = tensor.detach() if tensor.requires_grad else tensor
        at_its_place.append((tensor, name))
        return name


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.dtype, tensor.shape, tensor.stride()


#: Names that a file's header uses itself.
_TAKEN = {"checksums", "__metadata__"}


def _below(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
