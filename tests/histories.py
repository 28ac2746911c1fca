"""Histories for tests, and whether those of a test have the events of ``clusterddp/history`` alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from clusterddp.history.codec import decode, listed
from clusterddp.history.event import EVENTS, Event, Unread
from clusterddp.history.steps import Result
from clusterddp.history.view import RunView
from clusterddp.rundir.files import append_line
from clusterddp.rundir.json_lines import read_lines
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.schemas import EVENT

#: A value of each type of a field.
_VALUES: Mapping[Any, Any] = {int: 0, float: 0.0, str: "", bool: False, Sequence: [], Mapping: {}, Any: None}


def event_of(line: Mapping[str, Any]) -> Event:
    """The event of a line, which is made ``whole``."""
    return decode(whole(line))


def view(lines: Iterable[Mapping[str, Any]]) -> RunView:
    """The history with these lines, each ``whole``."""
    return RunView(map(event_of, lines))


def happened(run: RunDirectory, *lines: Mapping[str, Any]) -> None:
    """Appends lines to a run's history, each ``whole``."""
    append_line(run.events_file, *map(whole, lines))


def whole(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line with a value of its type for each field that is missing and must be there."""
    found = {"time": 0.0, "attempt": 0, **line}
    for name, annotation in _required(line["event"]).items():
        if name not in found:
            found[name] = _value(annotation)
    return found


@cache
def _required(event: str) -> Mapping[str, Any]:
    """The types of the fields that each line of an event has. None of an unknown event."""
    if (kind := EVENTS.get(event)) is None:
        return {}
    always, _ = fields(listed(kind))
    return {name: annotation for name, annotation in get_type_hints(kind).items() if name in always}


def _value(annotation: Any) -> Any:
    return None if type(None) in get_args(annotation) else _VALUES[get_origin(annotation) or annotation]


def fields(text: str) -> tuple[set[str], set[str]]:
    """The names that are always there, and all names."""
    names = text.split()
    return {name for name in names if name[-1] != "?"}, {name.rstrip("?") for name in names}


def check_history(lines: Iterable[Mapping[str, Any]]) -> None:
    """Fails unless each line is an event of its class, with values of the types of its fields, and no others."""
    for line in lines:
        event = decode(line)
        assert not isinstance(event, Unread), f"not read: {line}"
        assert not event.others or isinstance(event, Result), f"{sorted(event.others)} of {event.name!r} are not listed"


def check_histories(folder: Path) -> None:
    """All histories in a test's folder are read whole. A test may write events of other versions."""
    for file in [*folder.glob("events.jsonl"), *folder.glob("*/events.jsonl"), *folder.glob("*/*/events.jsonl")]:
        with suppress(OSError):  # a test may have made it unreadable
            check_history([line for line in read_lines(file, EVENT) if line["event"] in EVENTS])
