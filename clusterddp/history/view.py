"""The history of a run as its readers see it: the run's attempts, folded from its events in their order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from clusterddp.history.beginnings import Beginning, Forked, NotRead, OwnCheckpointRead, Submitted
from clusterddp.history.ends import AttemptEnd, RunEnd
from clusterddp.history.event import Event
from clusterddp.history.steps import ChildStep, StepsSeen

_E = TypeVar("_E", bound=Event)
#: Events of an attempt that never started its ranks. Any other event shows that it did, even if `started` is missing.
_WITHOUT_RANKS = (Submitted, Forked, RunEnd)


class Events:
    """Events, the oldest first."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._events: list[Event] = []
        for event in events:
            self.add(event)

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    def __len__(self) -> int:
        return len(self._events)

    def add(self, event: Event) -> None:
        """Adds an event that was recorded after the others."""
        self._events.append(event)

    def all(self, kind: type[_E]) -> list[_E]:
        """The events of a class."""
        return [event for event in self if isinstance(event, kind)]

    def first(self, kind: type[_E]) -> _E | None:
        """The oldest event of a class."""
        return next((event for event in self if isinstance(event, kind)), None)

    def last(self, kind: type[_E]) -> _E | None:
        """The newest event of a class."""
        return next((event for event in reversed(self._events) if isinstance(event, kind)), None)

    def has(self, *kinds: type[Event]) -> bool:
        """Whether there is an event of one of the classes."""
        return any(isinstance(event, kinds) for event in self)

    @property
    def began(self) -> float | None:
        """When the first event happened, in unix seconds. None if there is none."""
        return min((event.time for event in self), default=None)


class AttemptView(Events):
    """The events of an attempt. One that has recorded none has a view without events."""

    def __init__(self, number: int, events: Iterable[Event] = ()) -> None:
        self.number = number
        super().__init__(events)

    @property
    def has_ranks(self) -> bool:
        """Whether the attempt has started its ranks."""
        return any(not isinstance(event, _WITHOUT_RANKS) for event in self)

    @property
    def last_time(self) -> float:
        """When its last event happened, in unix seconds. 0 if there is none."""
        return self._events[-1].time if self._events else 0.0

    @property
    def ran_s(self) -> float:
        """The seconds from the start of its ranks to its last event."""
        starts = (event.time for event in self if not isinstance(event, _WITHOUT_RANKS))
        return self.last_time - next(starts, self.last_time)

    @property
    def lasted_s(self) -> float:
        """The seconds between its first and its last event."""
        return self._events[-1].time - self._events[0].time if self._events else 0.0

    @property
    def first_step(self) -> int | None:
        """The step at which its loop began. None if no loop has begun."""
        beginning = self.first(Beginning)
        return None if beginning is None else beginning.step

    @property
    def has_unnumbered_steps(self) -> bool:
        """Whether a step of unknown number was completed."""
        return self.has(StepsSeen, ChildStep)

    @property
    def unread(self) -> NotRead | None:
        """That the script did not read its checkpoint, and has not read one later either."""
        read = [event for event in self if isinstance(event, NotRead | OwnCheckpointRead)]
        return read[-1] if read and isinstance(read[-1], NotRead) else None

    @property
    def is_open(self) -> bool:
        """Whether no end is recorded."""
        return not self.has(AttemptEnd)


class RunView(Events):
    """The events of a run, and its attempts. ``partial``: whether only those at both ends of its file were read."""

    def __init__(self, events: Iterable[Event] = (), *, partial: bool = False) -> None:
        self._attempts: dict[int, AttemptView] = {}
        self.partial = partial
        super().__init__(events)

    def add(self, event: Event) -> None:
        """Adds an event that was recorded after the others."""
        super().add(event)
        if (attempt := self._attempts.get(event.attempt)) is None:
            attempt = self._attempts[event.attempt] = AttemptView(event.attempt)
        attempt.add(event)

    def attempt(self, number: int) -> AttemptView:
        """An attempt."""
        return self._attempts.get(number, AttemptView(number))

    @property
    def attempts(self) -> list[AttemptView]:
        """The attempts with events, by their numbers."""
        return [self._attempts[number] for number in sorted(self._attempts)]

    @property
    def newest(self) -> AttemptView | None:
        """The newest attempt with events."""
        return self._attempts[max(self._attempts)] if self._attempts else None

    def is_superseded(self, number: int) -> bool:
        """Whether a later attempt has events."""
        return max(self._attempts, default=number) > number

    @property
    def with_ranks(self) -> list[AttemptView]:
        """The attempts that have started their ranks."""
        return [attempt for attempt in self.attempts if attempt.has_ranks]

    @property
    def attempts_made(self) -> int:
        """How many attempts have started their ranks. Of a partial history, those that were not read are counted by
        their numbers."""
        made = self.with_ranks
        return made[-1].number + 1 - self.has(Forked) if self.partial and made else len(made)

    def before(self, number: int) -> list[AttemptView]:
        """The attempts before this one."""
        return [attempt for attempt in self.attempts if attempt.number < number]
