"""Frozen dataclasses from and to JSON objects. A field's type says which values it takes. Standard library only.

Events of a history (``history/codec.py``) and messages between processes (``messages/``) are read with it.
"""

from __future__ import annotations

import enum
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

_T = TypeVar("_T")

#: The number of a step or an attempt.
Count = Annotated[int, "not negative"]
#: A unix time, or a duration that ends.
Time = Annotated[float, "from 0 to 1e11"]
#: A duration that may be infinite.
Seconds = Annotated[float, "any"]
#: Larger numbers cannot be printed. Damaged lines may have some.
_LARGEST = 1e300


class Misfit(Exception):
    """A JSON object is none of the expected class: ``'step' is '7'``."""


@dataclass(frozen=True)
class Entry:
    """How a value is read. ``convert``: what it becomes, None if it stays as it is. ``always``: it has no default."""

    fits: Callable[[Any], bool]
    convert: Callable[[Any], Any] | None = None
    always: bool = False


def read(kind: type[_T], values: Any) -> _T:
    """The object of a class that has these values. Others than those of its fields are left out. Raises Misfit."""
    if not isinstance(values, dict):
        raise Misfit(f"expected an object, got {reprlib.repr(values)}")
    return kind(**fitting(entries(kind), values))  # type: ignore[arg-type]  # mypy: a class is not Hashable


def name_of(kind: type[Any]) -> str:
    """The name of a class in JSON: in snake case."""
    return re.sub("(?<=.)(?=[A-Z])", "_", kind.__name__).lower()


def by_name(union: Any) -> Mapping[str, type[Any]]:
    """The classes of a union by their names."""
    return {name_of(kind): kind for kind in get_args(union)}


def read_one(kinds: Mapping[str, type[Any]], key: str, values: Any) -> Any:
    """The object of one of these classes, which ``values[key]`` names. Raises Misfit."""
    name = values.get(key) if isinstance(values, dict) else None
    if not isinstance(name, str) or name not in kinds:
        raise Misfit(f"{key!r} is {reprlib.repr(name)}")
    return read(kinds[name], values)


def written(value: Any) -> dict[str, Any]:
    """The fields of an object that differ from their defaults, to be encoded with ``plain``."""
    given = {item.name: (getattr(value, item.name), _default(item)) for item in fields(value)}
    return {name: each for name, (each, default) in given.items() if default is MISSING or each != default}


def plain(value: Any) -> Any:
    """What json is to write for a value of a class of ours: its ``default=``. Raises TypeError for another one."""
    if isinstance(value, enum.Enum):
        return value.value
    if is_dataclass(value):
        return vars(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _default(item: Field[Any]) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


def fitting(entries: Mapping[str, Entry], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of these fields. A missing value of a field that may be None is None. Raises Misfit."""
    found: dict[str, Any] = {}
    for name, entry in entries.items():
        if name not in values and not entry.always:
            continue
        value = values.get(name)
        if not entry.fits(value):
            raise Misfit(f"{name!r} is {reprlib.repr(value)}")
        found[name] = value if entry.convert is None else entry.convert(value)
    return found


@cache
def entries(kind: Any) -> Mapping[str, Entry]:
    """How the fields of a dataclass are read."""
    types = get_type_hints(kind, include_extras=True)
    found = {}
    for item in fields(kind):
        entry = _entry(types[item.name])
        always = item.default is MISSING and item.default_factory is MISSING
        found[item.name] = Entry(entry.fits, entry.convert, always)
    return found


def _entry(annotation: Any) -> Entry:
    """How a value of a type is read."""
    if annotation in _PLAIN:
        return Entry(_PLAIN[annotation])
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return _of_union([_entry(part) for part in parts])
    if origin is Mapping:
        item = _entry(parts[1])
        return Entry(lambda value: isinstance(value, dict) and all(map(item.fits, value.values())))
    if origin is Sequence or parts[1:] == (...,):
        return _of_sequence(_entry(parts[0]))
    if origin is tuple:
        items = [_entry(part) for part in parts]
        return Entry(
            lambda value: (
                isinstance(value, list)
                and len(value) == len(items)
                and all(item.fits(each) for item, each in zip(items, value, strict=True))
            ),
            tuple,
        )
    if isinstance(annotation, type) and is_dataclass(annotation):
        kind: type[Any] = annotation
        return Entry(lambda value: _is_read(kind, value), lambda value: read(kind, value))
    assert issubclass(annotation, enum.Enum), annotation
    words = {member.value for member in annotation}
    return Entry(lambda value: isinstance(value, str) and value in words, annotation)


def _of_union(parts: Sequence[Entry]) -> Entry:
    """One part at most is converted: the others are None or plain values."""
    convert = next((part.convert for part in parts if part.convert is not None), None)
    return Entry(
        lambda value: any(part.fits(value) for part in parts),
        convert and (lambda value: None if value is None else convert(value)),
    )


def _of_sequence(item: Entry) -> Entry:
    convert = item.convert
    return Entry(
        lambda value: isinstance(value, list) and all(map(item.fits, value)),
        tuple if convert is None else lambda value: tuple(map(convert, value)),
    )


def _is_read(kind: Any, value: Any) -> bool:
    try:
        read(kind, value)
    except Misfit:
        return False
    return True


_PLAIN: Mapping[Any, Callable[[Any], bool]] = {
    Any: lambda _: True,
    int: lambda value: type(value) is int and -(2**63) <= value < 2**63,
    float: lambda value: type(value) in (int, float) and -_LARGEST < value < _LARGEST,
    str: lambda value: isinstance(value, str),
    bool: lambda value: isinstance(value, bool),
    NoneType: lambda value: value is None,
    Count: lambda value: type(value) is int and 0 <= value < 2**63,
    Time: lambda value: type(value) in (int, float) and 0 <= value < 1e11,
    Seconds: lambda value: type(value) in (int, float),
}
