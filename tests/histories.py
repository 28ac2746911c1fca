"""Whether events have the fields of their classes in ``clusterddp/history``, and messages those of ``protocol.py``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from clusterddp.history.codec import listed
from clusterddp.history.event import EVENTS
from clusterddp.protocol import CHANNEL_EVENTS
from clusterddp.rundir.json_lines import read_lines

#: The fields of events and messages, as a text.
EVERY = {name: listed(kind) for name, kind in EVENTS.items()}
EVERY |= {name: message.fields for name, message in CHANNEL_EVENTS.items()}


def fields(text: str) -> tuple[set[str], set[str]]:
    """The names that are always there, and all names."""
    names = text.split()
    return {name for name in names if name[-1] != "?"}, {name.rstrip("?") for name in names}


def check_event(event: str, given: Iterable[str], complete: bool = True) -> None:
    """Fails unless the protocol lists the event with these fields; ``complete``: all that are always there are."""
    assert event in EVERY, f"{event!r} is not listed"
    always, known = fields(EVERY[event])
    more, less = set(given) - known - {"rank"}, always - set(given)
    assert not more or event == "result", f"{sorted(more)} of {event!r} are not listed"
    assert not less or not complete, f"{event!r} lacks {sorted(less)}"


def check_history(events: Iterable[Mapping[str, Any]], complete: bool = True) -> None:
    """The same for the lines of a history."""
    for line in events:
        check_event(line["event"], line.keys() - {"time", "attempt", "event"}, complete)


def check_histories(folder: Path) -> None:
    """All histories in a test's folder have listed fields alone. A test may write parts of events, or others."""
    for file in [*folder.glob("events.jsonl"), *folder.glob("*/events.jsonl"), *folder.glob("*/*/events.jsonl")]:
        with suppress(OSError):  # a test may have made it unreadable
            check_history([line for line in read_lines(file) if line.get("event") in EVERY], complete=False)
