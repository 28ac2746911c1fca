"""When the commands that wait for runs ask the controller."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from clusterddp.errors import SlurmUnavailable
from clusterddp.rundir.files import append_line
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm import pace
from clusterddp.slurm.pace import QUIET_S, SILENT_AFTER_S, Activity, Pace, PacedQueue


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pace.time, "monotonic", clock.monotonic)
    monkeypatch.setattr(pace.random, "uniform", lambda least, most: most)
    return clock


def asked_in(clock: Clock, seconds: float, seen: Callable[[], object], most_s: float = QUIET_S) -> int:
    """How often a command that looks every second asks."""
    one, count, end = Pace(), 0, clock.now + seconds
    while clock.now < end:
        if one.due(seen()):
            count += 1
            one.asked(most_s)
        clock.now += 1
    return count


def test_a_run_that_trains_for_an_hour_is_asked_about_at_most_twenty_times(clock: Clock) -> None:
    """With the 50 questions of its supervisor, that is the budget of 70."""
    assert 12 <= asked_in(clock, 3600, lambda: "running") <= 20


def test_a_change_is_asked_about_at_once_but_not_more_than_once_a_second(clock: Clock) -> None:
    one = Pace()
    for _ in range(12):
        while not one.due("running"):
            clock.now += 1
        one.asked()
    clock.now += 10
    assert not one.due("running") and one.due("requeued")
    one.asked()
    assert not one.due("started")
    clock.now += pace.SOON_S
    assert one.due("started")


def event(run: RunDirectory, name: str, attempt: int = 0) -> None:
    append_line(run.events_file, {"time": 1.0, "attempt": attempt, "event": name})


def test_only_the_start_and_the_end_of_an_attempt_are_changes(run: RunDirectory, clock: Clock) -> None:
    activity = Activity(run)
    event(run, "started")
    started = activity.seen()
    for _ in range(100):
        clock.now += 5
        append_line(run.metrics_file, {"step": 1, "attempt": 0, "time": 1.0})
        event(run, "checkpoint")
        assert activity.seen() == started
    event(run, "requeued")
    assert activity.seen() != started


def test_a_run_is_silent_after_a_minute_or_after_three_times_its_longest_pause(run: RunDirectory, clock: Clock) -> None:
    activity = Activity(run)
    event(run, "started")
    activity.seen()
    clock.now += SILENT_AFTER_S + 1
    activity.seen()
    assert activity.silent
    event(run, "checkpoint")
    activity.seen()
    assert not activity.silent
    clock.now += 40
    event(run, "checkpoint")
    activity.seen()
    clock.now += SILENT_AFTER_S + 1
    assert not activity.silent
    clock.now += 60
    assert activity.silent


def test_a_refreshed_view_keeps_slurms_last_answer_and_its_last_error(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[object] = [{}, SlurmUnavailable("no answer"), {}]
    asked: list[float] = []

    def queued_jobs(ids: object, timeout_s: float) -> object:
        asked.append(clock.now)
        if isinstance(answer := answers.pop(0), SlurmUnavailable):
            raise answer
        return answer

    monkeypatch.setattr(pace, "queued_jobs", queued_jobs)
    queue = PacedQueue()
    assert queue.jobs("a", ["1"], 1.0) == queue.jobs("a", ["1"], 1.0) == {}
    clock.now += 2
    for _ in range(2):
        with pytest.raises(SlurmUnavailable):
            queue.jobs("b", ["1"], 1.0)
    clock.now += 2
    assert queue.jobs("b", ["1"], 1.0) == {}
    assert asked == [1000.0, 1002.0, 1004.0]
