"""Events from and to the objects in the lines of ``events.jsonl``.

A line is read into the class of its event if it has the fields of that class, with values of their types. Otherwise it
is ``Unread``, and nothing of it is lost: ``encode`` is the inverse of ``decode`` for every line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from functools import cache
from typing import Any

from clusterddp import codec
from clusterddp.codec import Entry, Misfit
from clusterddp.history import beginnings, checkpoints, ends, failures, steps, stops
from clusterddp.history.event import EVENTS, Event, Unread, name_of
from clusterddp.reporter import in_one_line

#: The modules with events, in the order of the reference. Each adds its own to ``EVENTS``.
MODULES = (beginnings, steps, checkpoints, stops, failures, ends)
#: The fields that every line has, besides the name of its event.
_OF_EVERY_LINE = ("time", "attempt")


def decode(line: Mapping[str, Any]) -> Event:
    """The event of a line that matches ``rundir.schemas.EVENT``. A missing field that may be None is None."""
    try:
        return read(line)
    except Misfit:
        return _unread(line)


def read(line: Mapping[str, Any]) -> Event:
    """The same. Raises Misfit for a known event whose fields have not their types."""
    if (name := line["event"]) not in EVENTS:
        return _unread(line)
    entries = _entries(name)
    values = codec.fitting(entries, line)
    others = {name: value for name, value in line.items() if name not in entries and name != "event"}
    return EVENTS[name](**values, others=others, order=tuple(line))


def _unread(line: Mapping[str, Any]) -> Unread:
    others = {name: value for name, value in line.items() if name not in ("time", "attempt", "event")}
    return Unread(time=line["time"], attempt=line["attempt"], event=line["event"], others=others, order=tuple(line))


def encode(event: Event) -> dict[str, Any]:
    """The object of an event's line. Without the fields that have their default, unless the event was read from a line
    with them. A field that was changed since is the last one."""
    own_fields = _fields(type(event))  # type: ignore[arg-type]  # mypy: a class is not Hashable
    values = {"time": event.time, "attempt": event.attempt, "event": name_of(event)}
    own = {item.name: getattr(event, item.name) for item in own_fields}
    values |= {name: list(value) if isinstance(value, tuple) else value for name, value in own.items()}
    values |= event.others
    missing = (None,) if event.order else ()
    omitted = {item.name for item in own_fields if own[item.name] in (item.default, *missing)}
    names = dict.fromkeys((*event.order, *(name for name in values if name not in omitted)))
    return {name: values[name] for name in names}


def sentence(event: Event) -> str | None:
    """One sentence for an event, with its attempt. None for events that are only recorded."""
    words = words_of(event)
    return f"attempt {event.attempt}: {words}" if words else None


def words_of(event: Event) -> str | None:
    """The same without its attempt."""
    try:
        text = event.sentence()
    except ValueError:  # a damaged line, whose fields contradict each other
        text = event.name
    return in_one_line(text) if text else None


def listed(kind: Any) -> str:
    """The names of an event's fields, as in ``step? reason`` if ``step`` may be missing. Without ``rank``, which every
    event may have, unless this event always has it."""
    always = {item.name for item in _fields(kind) if item.default is MISSING}
    names = (item.name for item in _fields(kind) if item.name != "rank" or "rank" in always)
    return " ".join(name if name in always else f"{name}?" for name in names)


@cache
def _entries(event: str) -> Mapping[str, Entry]:
    """How the fields of a line are read."""
    kind: Any = EVENTS[event]
    entries = codec.entries(kind)
    return {name: entries[name] for name in (*_OF_EVERY_LINE, *(item.name for item in _fields(kind)))}


@cache
def _fields(kind: Any) -> tuple[Field[Any], ...]:
    """The fields of a class that are of its lines alone."""
    return tuple(item for item in fields(kind) if item.name not in (*_OF_EVERY_LINE, "others", "order", "event"))
