"""A run's history as its attempts."""

from __future__ import annotations

from clusterddp.history.beginnings import Resumed, Started
from clusterddp.history.checkpoints import Checkpoint, OwnCheckpoint, SavedItself
from clusterddp.history.ends import AttemptEnd, Requeued
from clusterddp.history.view import RunView
from tests.histories import view

LINES = [
    {"time": 1.0, "attempt": 0, "event": "submitted"},
    {"time": 4.0, "attempt": 0, "event": "started", "nodes": "n1"},
    {"time": 6.0, "attempt": 0, "event": "from_the_future", "step": 4},
    {"time": 9.0, "attempt": 0, "event": "own_checkpoint", "file": "a.pt"},
    {"time": 10.0, "attempt": 0, "event": "requeued", "step": 5},
    {"time": 3.0, "attempt": 2, "event": "submitted"},
    {"time": 20.0, "attempt": 1, "event": "resumed", "step": 5},
]


def test_events_are_found_by_their_classes_in_their_attempts() -> None:
    history = view(LINES)
    first = history.attempt(0)
    assert [attempt.number for attempt in history.attempts] == [0, 1, 2]
    assert history.newest is history.attempts[-1] and not history.attempt(7) and RunView().newest is None
    assert [event.file for event in first.all(SavedItself)] == ["a.pt"]
    assert isinstance(first.first(AttemptEnd), Requeued) and isinstance(history.last(Started), Started)
    assert first.has(Resumed, OwnCheckpoint) and not first.has(Resumed, Checkpoint)
    assert history.attempt(1).first_step == 5 and first.first_step is None
    assert [event.at_step for event in history] == [None, None, 4, None, 5, None, 5]


def test_a_step_counts_also_in_an_event_whose_class_has_none() -> None:
    """A rank that trains adds its step to what it reports, and another version may add it to any event."""
    lines = [{"event": name, "step": 4} for name in ("gpu_fault", "phase", "from_the_future")]
    assert [event.at_step for event in view(lines)] == [4, 4, 4]


def test_an_attempt_that_was_only_submitted_has_no_ranks() -> None:
    history = view(LINES)
    assert [attempt.number for attempt in history.with_ranks] == [0, 1]
    assert [attempt.is_open for attempt in history.attempts] == [False, True, True]
    assert (history.attempt(0).lasted_s, history.attempt(0).ran_s, history.attempt(2).ran_s) == (9.0, 6.0, 0.0)
    assert history.is_superseded(1) and not history.is_superseded(2)


def test_attempts_between_the_ends_of_a_history_are_counted_by_their_numbers() -> None:
    """Apart from the attempt that a fork begins with."""
    ends = [LINES[1], {"time": 90.0, "attempt": 8, "event": "started"}]
    forked = {"time": 0.0, "attempt": 0, "event": "forked", "step": 4}
    assert view(ends).attempts_made == 2
    assert RunView(view(ends), partial=True).attempts_made == 9
    assert RunView(view([forked, *ends[1:]]), partial=True).attempts_made == 8
    assert RunView(view(LINES[:1]), partial=True).attempts_made == 0


def test_a_history_that_grows_is_as_one_that_is_read_at_once() -> None:
    grown = RunView()
    for event in view(LINES):
        grown.add(event)
    assert list(grown) == list(view(LINES)) and grown.attempts[0].is_open is False
