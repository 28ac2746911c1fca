"""Events from and to the objects in the lines of ``events.jsonl``.

A line is read into the class of its event if it has the fields of that class, with values of their types. Otherwise it
is ``Unread``, and nothing of it is lost: ``encode`` is the inverse of ``decode`` for every line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from clusterddp.history import beginnings, checkpoints, ends, failures, steps, stops
from clusterddp.history.event import EVENTS, Event, Unread
from clusterddp.reporter import in_one_line

#: The modules with events, in the order of the reference. Each adds its own to ``EVENTS``.
MODULES = (beginnings, steps, checkpoints, stops, failures, ends)
#: The fields that every line has, besides the name of its event.
_OF_EVERY_LINE = ("time", "attempt")
#: Larger numbers cannot be printed. Damaged lines may have some.
_LARGEST = 1e300


def decode(line: Mapping[str, Any]) -> Event:
    """The event of a line that matches ``rundir.schemas.EVENT``. A missing field that may be None is None."""
    if (name := line["event"]) not in EVENTS:
        return _unread(line)
    entries = _entries(name)
    values: dict[str, Any] = {}
    for name, entry in entries.items():
        if name not in line and not entry.always:
            continue
        value: Any = line.get(name)
        if not entry.fits(value):
            return _unread(line)
        values[name] = tuple(value) if entry.sequence else value
    others = {name: value for name, value in line.items() if name not in entries and name != "event"}
    return EVENTS[line["event"]](**values, others=others, order=tuple(line))


def _unread(line: Mapping[str, Any]) -> Unread:
    others = {name: value for name, value in line.items() if name not in ("time", "attempt", "event")}
    return Unread(time=line["time"], attempt=line["attempt"], event=line["event"], others=others, order=tuple(line))


def encode(event: Event) -> dict[str, Any]:
    """The object of an event's line. Without the fields that have their default, unless the event was read from a line
    with them."""
    kind = type(event)
    name = event.event if isinstance(event, Unread) else event.name
    values = {"time": event.time, "attempt": event.attempt, "event": name}
    own = {item.name: getattr(event, item.name) for item in _fields(kind)}
    values |= {name: list(value) if isinstance(value, tuple) else value for name, value in own.items()}
    values |= event.others
    if event.order:
        return {name: values[name] for name in event.order}
    omitted = {item.name for item in _fields(kind) if item.default is not MISSING and own[item.name] == item.default}
    return {name: value for name, value in values.items() if name not in omitted}


def sentence(line: Mapping[str, Any]) -> str | None:
    """One sentence for a line. None for events that are only recorded."""
    event = decode(line)
    try:
        text = event.sentence()
    except ValueError:  # a damaged line, whose fields contradict each other
        text = event.name
    return f"attempt {event.attempt}: {in_one_line(text)}" if text else None


def listed(kind: type[Event]) -> str:
    """The names of an event's fields, as in ``step? reason`` if ``step`` may be missing. Without ``rank``, which every
    event may have, unless this event always has it."""
    always = {item.name for item in _fields(kind) if item.default is MISSING}
    names = (item.name for item in _fields(kind) if item.name != "rank" or "rank" in always)
    return " ".join(name if name in always else f"{name}?" for name in names)


@dataclass(frozen=True)
class _Entry:
    """How a field is read. ``always``: it has no default. ``sequence``: a list becomes a tuple."""

    fits: Callable[[Any], bool]
    always: bool
    sequence: bool


@cache
def _entries(event: str) -> Mapping[str, _Entry]:
    """How the fields of a line are read."""
    kind = EVENTS[event]
    types = get_type_hints(kind)
    always = dict.fromkeys(_OF_EVERY_LINE, False)
    always |= {item.name: item.default is MISSING for item in _fields(kind)}
    return {
        name: _Entry(_check(types[name]), needed, get_origin(types[name]) is Sequence)
        for name, needed in always.items()
    }


def _fields(kind: type[Event]) -> tuple[Field[Any], ...]:
    """The fields of a class that are of its lines alone."""
    return tuple(item for item in fields(kind) if item.name not in (*_OF_EVERY_LINE, "others", "order", "event"))


def _check(annotation: Any) -> Callable[[Any], bool]:
    """Whether a value of JSON is of a type."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return lambda _: True
    if origin in (Union, UnionType):
        checks = [_check(part) for part in parts]
        return lambda value: any(check(value) for check in checks)
    if origin is Sequence:
        item = _check(parts[0])
        return lambda value: isinstance(value, list) and all(map(item, value))
    if origin is Mapping:
        item = _check(parts[1])
        return lambda value: isinstance(value, dict) and all(map(item, value.values()))
    return _PLAIN[annotation]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -_LARGEST < value < _LARGEST


_PLAIN: Mapping[Any, Callable[[Any], bool]] = {
    int: lambda value: type(value) is int and -(2**63) <= value < 2**63,
    float: _is_number,
    str: lambda value: isinstance(value, str),
    bool: lambda value: isinstance(value, bool),
    NoneType: lambda value: value is None,
}
