"""Converts a nested state to JSON and named tensors, and back."""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import torch

from clusterddp.checkpoint.file_format import Tensor
from clusterddp.checkpoint.sharded.sharding import dtensors, is_sharded, like, local
from clusterddp.errors import CheckpointError

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
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
_INTEGERS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}

#: The numpy scalars that Python numbers represent exactly.
_NUMPY_SCALARS = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
#: Python refuses to write longer integers in decimal.
_LONGEST_INT_BITS = 4096

#: A ``torch.nn.Buffer`` is of the first type.
_PLAIN_TENSORS = {torch.Tensor, torch.nn.Parameter}

#: Names that the format of the file reserves.
_RESERVED_NAMES = {"checksums", "__metadata__"}
#: An attribute of a tensor in a checkpoint's content: the GPU that it was saved from.
SAVED_FROM = "_clusterddp_saved_from"
#: The names, dtypes and shapes of tensors.
Layout: TypeAlias = "tuple[list[str], list[torch.dtype], list[torch.Size]]"


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
        setattr(found, SAVED_FROM, int(*gpu))
    return found


def _gpu_of(tensor: torch.Tensor) -> int | None:
    """The GPU that the tensor is on, or was saved from, counted from the rank's first one. None for a CPU."""
    if not tensor.is_cuda:
        return getattr(tensor, SAVED_FROM, None)
    return int(tensor.device.index - torch.cuda.current_device())


class Packed:
    """What ``pack`` returns, and what a save needs besides.

    Training waits while a save makes one. So all tensors are collected first, and each of their attributes is then read
    in one ``map``, which takes 50 ns per tensor.

    Of a DTensor, it has this rank's shard.
    """

    #: Entries of a file's metadata.
    facts: Mapping[str, str] = {}

    def __init__(self, content: Any) -> None:
        #: For each place in the state that has a tensor: the tensor, and its name, which is at first its path.
        self._tensors: list[torch.Tensor] = []
        self._names: list[Any] = []
        #: The DTensors, by the place of their shards.
        self._wholes: dict[int, Any] = {}
        self._dtensors = dtensors()
        #: The dicts that still have tensors where their JSON form has names, and the place of the first one.
        self._forms: list[tuple[dict[str, Any], int]] = []
        try:
            self._plain = self._walk(content, "")
        except RecursionError:
            raise CheckpointError("the state is nested too deeply, or contains itself") from None
        found = self._tensors
        dtypes, shapes, addresses = self._attributes()
        self.tensors = dict(zip(self._names, found, strict=True))
        kept: Sequence[int] = range(len(found))
        same_path = len(self.tensors) < len(found)
        same_memory = len(set(addresses)) < len(found)
        if same_path or same_memory or not self.tensors.keys().isdisjoint(_RESERVED_NAMES):
            kept = self._name(addresses)
        #: The DTensors, by the names of their shards.
        self.sharded = {self._names[place]: whole for place, whole in self._wholes.items()}
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

    def select(self, places: Sequence[int]) -> None:
        """Leaves out the other tensors, but not their places in the state."""
        names, dtypes, shapes = self.layout
        names = [names[place] for place in places]
        self.layout = names, [dtypes[place] for place in places], [shapes[place] for place in places]
        self.tensors = {name: self.tensors[name] for name in names}
        self.addresses = [self.addresses[place] for place in places]

    def unpacked(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        """The state with these tensors, such as copies. For a DTensor, ``tensors`` has this rank's shard."""
        wholes = {name: like(whole, tensors[name]) for name, whole in self.sharded.items()}
        return unpack(self.plain(), {**tensors, **wholes})

    def plain(self) -> Any:
        """The state as JSON values. Training does not wait until they are complete."""
        names = list(self._names)
        for place, gpu in enumerate(map(_gpu_of, self._tensors)):
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
            self._forms.append((form, len(self._tensors)))
            self._tensors.append(item)
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
            return [self._walk(entry, _below(path, number)) for number, entry in enumerate(item)]
        if kind is dict and set(map(type, item)) <= {str} and not _looks_special(item):
            values = list(item.values())
            if _is_plain_list(values):
                return item.copy()
            if not self._dtensors.isdisjoint(map(type, values)):
                values = self._shards(values)
            if set(map(type, values)) <= _PLAIN_TENSORS:
                form = item.copy()
                self._forms.append((form, len(self._tensors)))
                self._tensors += values
                self._names += [f"{path}.{key}" for key in item] if path else item
                return form
            return {key: self._walk(entry, _below(path, key)) for key, entry in item.items()}
        if kind is OrderedDict and hasattr(item, "_metadata"):
            return {"$module": [self._walk(dict(item.items()), path), self._walk(_versions(item._metadata), path)]}
        if kind in _NAME_OF:
            plain = _KINDS[_NAME_OF[kind]].to_plain(item)
            return {f"${_NAME_OF[kind]}": (self._members if isinstance(item, dict) else self._walk)(plain, path)}
        if kind.__module__ == "numpy" and (found := self._numpy(item, path)) is not None:
            return found
        if is_sharded(item):
            self._wholes[len(self._tensors)] = item
            return self._walk(local(item), path)
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

    def _shards(self, values: list[Any]) -> list[Any]:
        """The values with this rank's shards in place of DTensors, which is fast, if all of them are tensors then."""
        shards = [value._local_tensor if type(value) in self._dtensors else value for value in values]
        if not set(map(type, shards)) <= _PLAIN_TENSORS:
            return values
        places = enumerate(values, len(self._tensors))
        self._wholes.update((place, value) for place, value in places if type(value) in self._dtensors)
        return shards

    def _members(self, pairs: list[list[Any]], path: str) -> Any:
        return [[self._walk(key, path), self._walk(value, _below(path, key))] for key, value in pairs]

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
        found = self._tensors
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
        for tensor, path in zip(self._tensors, self._names, strict=True):
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
        for place, (tensor, path, address) in enumerate(zip(self._tensors, self._names, addresses, strict=True)):
            view = _view(tensor) if often[address] > 1 else address
            if view not in names:
                name, number = path, 2
                while name in self.tensors or name in _RESERVED_NAMES:
                    name, number = f"{path}#{number}", number + 1
                self.tensors[name], names[view] = tensor, name
                kept.append(place)
            self._names[place] = names[view]
        return kept


def _is_plain(dtype: Any) -> bool:
    """Whether values of this numpy dtype can be restored exactly from Python numbers or a tensor."""
    return dtype.name in _NUMPY_SCALARS and dtype.isnative


def _is_plain_list(items: list[Any]) -> bool:
    """Whether these are only texts, flags and ordinary integers, such as the numbers of an optimizer's parameters."""
    kinds = set(map(type, items))
    if not kinds <= {str, bool, int, type(None)}:
        return False
    numbers = [item for item in items if type(item) is int] if kinds - {int} else items
    return max(map(int.bit_length, numbers), default=0) < _LONGEST_INT_BITS


def _looks_special(item: dict[str, Any]) -> bool:
    """Whether a key begins like that of a kind, such as ``$tensor``."""
    return "$" in "".join(item) and "$" in [key[:1] for key in item]


def _order(tensor: torch.Tensor) -> list[int]:
    """The dimensions by their order in memory, the outermost first."""
    return sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)


def _view(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for two tensors that have the same values at the same positions, because they share memory."""
    place = tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()
    return *place, tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _below(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


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
