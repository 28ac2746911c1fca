"""The state of a script's own objects, as digests by their names in the script.

Only a search through the script's variables can find a part that a checkpoint lacks, such as an average of the weights.
Code of libraries is not searched.
"""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from clusterddp.checkpoint.packing import bits_of, pack
from clusterddp.checkpoint.parts import GeneratorPart, with_state
from clusterddp.checkpoint.state_dict import state_of
from clusterddp.failures.stack_traces import is_library, outward

#: Plain values whose text is at most this long are shown as they are.
_SHORT = 60
#: A larger tensor of a GPU is summed up there, this many elements at a time, rather than copied.
_COPIED_BYTES, _SUMMED = 1 << 16, 1 << 22
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def of_part(part: Any) -> dict[str, str]:
    """The digests of a part's state by the names in it. Raises what the part's ``state_dict()`` raises."""
    state = state_of(with_state(part))
    try:
        plain, tensors = pack(state)
    except Exception:  # a state that could not be saved, of an object that is no part
        return {name: of_value(value) for name, value in state.items()}
    found = {name: of_value(tensor) for name, tensor in tensors.items()}
    return found | {name: of_value(value) for name, value in _leaves(plain, "")}


def of_value(value: Any) -> str:
    """The value itself if it is a short plain one, else a hash of its content."""
    if isinstance(value, _PLAIN) and len(text := repr(value)) <= _SHORT:
        return text
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.layout is torch.strided:
        return f"{value.detach().reshape(()).item()!r}"
    content = hashlib.blake2b(digest_size=12)
    for piece in _content(value):
        content.update(piece)
    return f"#{content.hexdigest()}"


def _leaves(plain: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The values in the JSON form of a state by their path. Tensors are elsewhere."""
    if isinstance(plain, dict) and "$tensor" not in plain:
        for key, value in plain.items():
            yield from _leaves(value, path if key.startswith("$") else f"{path}.{key}" if path else key)
    elif isinstance(plain, list):
        for number, value in enumerate(plain):
            yield from _leaves(value, f"{path}[{number}]")
    elif not isinstance(plain, dict):
        yield path, plain


def _content(value: Any) -> Iterator[bytes]:
    """The content of a value as bytes, with the types of all that it consists of."""
    yield f"{type(value).__qualname__}(".encode()
    if isinstance(value, torch.Tensor):
        yield from _of_tensor(value.detach())
    elif isinstance(value, _PLAIN):
        yield repr(value).encode()
    elif type(value).__module__ == "numpy" and hasattr(value, "tobytes") and not value.dtype.hasobject:
        yield f"{value.dtype}{value.shape}".encode()
        yield value.tobytes()
    elif isinstance(value, (set, frozenset)):
        yield from sorted(of_value(entry).encode() for entry in value)
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _content(key)
            yield from _content(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _content(entry)
    else:
        yield from _of_object(value)
    yield b")"


def _of_object(value: Any) -> Iterable[bytes]:
    """An object of a class of the script's or a library's own: its attributes, or what a worker would send."""
    if attributes := getattr(value, "__dict__", None):
        return _content(dict(attributes))
    try:
        return [pickle.dumps(value)]
    except Exception:  # its content is unknown
        return []


@torch.no_grad()
def _of_tensor(tensor: torch.Tensor) -> Iterator[bytes]:
    yield f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    bits = bits_of(tensor)
    if tensor.device.type == "cpu" or bits.nbytes <= _COPIED_BYTES:
        yield bits.cpu().numpy().tobytes()
        return
    yield str(_summed(bits)).encode()


def _summed(bits: torch.Tensor) -> int:
    """A sum over a tensor of integers, on its device: different for a changed element, and most likely for several."""
    total = 0
    pieces: tuple[torch.Tensor, ...] = torch.split(bits.flatten(), _SUMMED)
    for piece in pieces:
        # Odd factors, so that no single bit is lost, that differ from place to place.
        places = torch.arange(1, 2 * piece.numel(), 2, device=piece.device, dtype=torch.int64)
        total = hash((total, (piece.to(torch.int64) * places).sum().item()))
    return total


#: The search ends after this many values, or attributes of attributes.
_MOST, _DEEPEST, _LONGEST_LIST = 5000, 4, 100
_PLAIN_VALUES, _LARGEST_TENSOR = (bool, int, float, str), 10_000


class Surroundings:
    """The state of the script's own objects. ``parts``, what they consist of, the ``loader`` and ``others`` are no such
    objects."""

    def __init__(self, parts: Mapping[str, Any], loader: Any, others: Iterable[Any] = ()) -> None:
        self._parts, self._loader = parts, loader
        self._known = {id(one) for part in parts.values() for one in _with_members(part)} | {id(loader)}
        self._known |= set(map(id, others))

    def states(self) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
        """The digests of all objects with a state, and the plain values, by their names in the script."""
        search = self.search()
        return search.others, search.variables

    def search(self) -> Search:
        """A search through the script's variables, from the calls that lead here."""
        search = Search(self._known)
        for name, part in self._parts.items():
            search.generators_of(part, name)
        search.only_hints(self._loader, "loader")
        for frame in _frames_of_script():
            for scope in (frame.f_locals, frame.f_globals):
                for name, value in list(scope.items()):
                    if not name.startswith("__"):
                        search.visit(value, name, 0)
        return search


class Search:
    """One search through variables and attributes. Each object is visited once, under its first name."""

    def __init__(self, known: set[int]) -> None:
        self.others: dict[str, dict[str, str]] = {}
        self.variables: dict[str, str] = {}
        #: The objects with a state, by the same names as in ``others``.
        self.objects: dict[str, Any] = {}
        self._known, self._seen = known, set[int]()
        self._hints = False

    def only_hints(self, loader: Any, name: str) -> None:
        """Only a loader's batches are compared. Its state can only explain them."""
        self._hints = True
        self._attributes(loader, name, 0)
        self._hints = False

    def generators_of(self, module: Any, name: str) -> None:
        """Random generators, and plain values, that a module has as attributes: they are not in its state."""
        if not isinstance(module, torch.nn.Module):
            return
        for path, member in module.named_modules():
            path = path.removeprefix("module.").removeprefix("module")
            for attribute, value in vars(member).items():
                if _is_generator(value):
                    self.visit(value, ".".join(filter(None, (name, path, attribute))), 0)

    def visit(self, value: Any, name: str, depth: int) -> None:
        if type(value) in _PLAIN_VALUES or (type(value) is torch.Tensor and value.numel() <= _LARGEST_TENSOR):
            if len(self.variables) < _MOST:
                self.variables.setdefault(name, of_value(value))
            return
        if id(value) in self._seen or id(value) in self._known or len(self._seen) > _MOST:
            return
        self._seen.add(id(value))
        if isinstance(value, (type, ModuleType)):
            return
        if isinstance(value, (FunctionType, MethodType)):
            self._closure(value, depth)
        elif _is_generator(value) or _has_state(value):
            self._add(value, name)
            self.generators_of(value, name)
        elif depth < _DEEPEST:
            self._members(value, name, depth)

    def _add(self, value: Any, name: str) -> None:
        with suppress(Exception):  # the script's own code, in a place where it does not expect to be called
            state = of_part(value)
            if self._hints:
                self.variables[name] = of_value(state)
            elif state and name not in self.others:
                self.others[name], self.objects[name] = state, value

    def _closure(self, function: Any, depth: int) -> None:
        function = getattr(function, "__func__", function)
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # a cell that is not filled yet
                self.visit(cell.cell_contents, variable, depth + 1)

    def _members(self, value: Any, name: str, depth: int) -> None:
        if isinstance(value, (list, tuple)):
            if len(value) <= _LONGEST_LIST:
                for number, entry in enumerate(value):
                    self.visit(entry, f"{name}[{number}]", depth + 1)
        elif isinstance(value, dict):
            if len(value) <= _LONGEST_LIST:
                for key, entry in list(value.items()):
                    self.visit(entry, f"{name}[{key!r}]", depth + 1)
        elif _is_of_script(type(value)):
            self._attributes(value, name, depth)

    def _attributes(self, value: Any, name: str, depth: int) -> None:
        for attribute, entry in list(getattr(value, "__dict__", {}).items()):
            self.visit(entry, f"{name}.{attribute}", depth + 1)


def _with_members(part: Any) -> Iterator[Any]:
    """What is saved with a part: the modules in a module, or the generator that it stands for."""
    yield part
    if isinstance(part, torch.nn.Module):
        yield from part.modules()
    elif isinstance(part, GeneratorPart):
        yield part.generator


def _is_generator(value: Any) -> bool:
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if numpy := sys.modules.get("numpy"):
        kinds = (*kinds, numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, kinds)


def _has_state(value: Any) -> bool:
    """Looks at the class, because an object's attribute may be computed, or belong to a different object."""
    return hasattr(type(value), "state_dict") and hasattr(type(value), "load_state_dict")


def _frames_of_script() -> Iterator[FrameType]:
    """The calls that lead here, the innermost first, without those in libraries."""
    return (frame for frame in outward(sys._getframe(1)) if not is_library(frame.f_code.co_filename))


def _is_of_script(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    return kind.__module__ == "__main__" or (file is not None and not is_library(file))
