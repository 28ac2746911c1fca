"""What the script has besides what it gave to ``ctx.run()``: objects with a state, plain values, small tensors.

Only a search through the script's variables can find a part that was forgotten, such as an average of the weights. Code
of libraries is not searched.
"""

from __future__ import annotations

import random
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from clusterddp.checkpoint.generators import GeneratorPart
from clusterddp.training.resume_check.digests import of_part, of_value

#: The search ends after so many values, or attributes of attributes.
_MOST, _DEEPEST, _LONGEST_LIST = 5000, 4, 100
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_LIBRARIES = tuple(f"{folder}/" for folder in (*_INSTALLED, Path(__file__).resolve().parents[2]))
_PLAIN, _LARGEST_TENSOR = (bool, int, float, str), 10_000


class Surroundings:
    """The state of the script's own objects. ``parts``, what they consist of and the ``loader`` are no such objects."""

    def __init__(self, parts: Mapping[str, Any], loader: Any) -> None:
        self._parts, self._loader = parts, loader
        self._known = {id(one) for part in parts.values() for one in _with_members(part)} | {id(loader)}

    def states(self) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
        """The digests of all objects with a state, and the plain values, by their names in the script."""
        search = _Search(self._known)
        for name, part in self._parts.items():
            search.generators_of(part, name)
        search.only_hints(self._loader, "loader")
        for frame in _frames_of_script():
            for scope in (frame.f_locals, frame.f_globals):
                for name, value in list(scope.items()):
                    if not name.startswith("__"):
                        search.visit(value, name, 0)
        return search.others, search.variables


class _Search:
    """One search through variables and attributes; each object is visited once, under its first name."""

    def __init__(self, known: set[int]) -> None:
        self.others: dict[str, dict[str, str]] = {}
        self.variables: dict[str, str] = {}
        self._known, self._seen = known, set[int]()
        self._hints = False

    def only_hints(self, loader: Any, name: str) -> None:
        """Of the loader the batches count: what it has inside can only explain them."""
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
        if type(value) in _PLAIN or (type(value) is torch.Tensor and value.numel() <= _LARGEST_TENSOR):
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
                self.others[name] = state

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
    """By its class: an attribute of an object may be computed, or another object's."""
    return hasattr(type(value), "state_dict") and hasattr(type(value), "load_state_dict")


def _frames_of_script() -> Iterator[FrameType]:
    """The calls that lead here, the innermost first, as far as they are not in a library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not _is_library(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _is_of_script(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    return kind.__module__ == "__main__" or (file is not None and not _is_library(file))


def _is_library(file: str) -> bool:
    return file.startswith(("<", *_LIBRARIES))
