"""What all events of a history have in common.

A line of ``events.jsonl`` has ``time`` (unix seconds), ``attempt``, ``event``, which is the class's name in snake case,
and the event's fields. Ranks report some events over the control channel. The supervisor writes all of them, and adds
``rank`` to a rank's.

An event is one class in a module of this package, as ``beginnings.py``. Its docstring is its meaning in
docs/reference/events.md, and a field with a default may be missing in a line. An event without a sentence is only
recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from clusterddp import codec

#: All events, by their names.
EVENTS: dict[str, type[Event]] = {}


@dataclass(frozen=True, kw_only=True)
class Event:
    """A line of the history.

    ``rank``: the one that reported it. ``others``: fields that the class does not have, as they were read. ``order``:
    the names in the line that it was read from, in their order, so that it is written the same again.
    """

    name: ClassVar[str]

    time: float = 0.0
    attempt: int = 0
    rank: int | None = None
    others: Mapping[str, Any] = field(default_factory=dict)
    order: tuple[str, ...] = field(default=(), repr=False, compare=False)

    def __init_subclass__(cls, abstract: bool = False) -> None:
        cls.name = codec.name_of(cls)
        if not abstract:
            EVENTS[cls.name] = cls

    @property
    def at_step(self) -> int | None:
        """The number of completed steps that it names. None if it names none."""
        return getattr(self, "step", self.others.get("step"))

    def sentence(self) -> str | None:
        """The event in words."""
        return None


@dataclass(frozen=True, kw_only=True)
class Reported(Event, abstract=True):
    """An event that a rank reports. A supervisor accepts no others from ranks, because they run the user's code."""


def name_of(event: Event) -> str:
    """The event's name in its line."""
    return event.event if isinstance(event, Unread) else event.name


@dataclass(frozen=True, kw_only=True)
class Unread(Event, abstract=True):
    """An event of another version of clusterddp, or a damaged one. ``others`` has its fields as in the line."""

    event: str

    def sentence(self) -> str | None:
        return self.event if self.event in EVENTS else None
