"""A run that waits for its batches is told so once, and what to change."""

from __future__ import annotations

from typing import Any

import pytest

from clusterddp.training import step_timing
from clusterddp.training.step_timing import SAMPLE_STEPS, SAMPLES, HostClock, InputWait, StepTimes


def told(shares: list[float], seconds: float = 60.0, workers: int = 0) -> list[dict[str, Any]]:
    """The events of a run with a sample of so many seconds for each share of waiting."""
    events: list[dict[str, Any]] = []
    wait = InputWait(lambda event, **fields: events.append({"event": event, **fields}), lambda: 500, workers)
    data = other = 0.0
    for share in shares:
        data, other = data + share * seconds, other + (1 - share) * seconds
        wait.look((data, other * 0.5, other * 0.25, other * 0.25))
    return events


def test_waiting_for_more_than_a_tenth_of_the_time_is_said_once() -> None:
    (event,) = told([0.2] * 50)
    assert (event["event"], event["step"], event["percent"]) == ("waits_for_data", 500, 20)
    assert not told([0.09] * 50)


def test_what_counts_is_the_time_since_the_last_samples() -> None:
    assert not told([0.9] + [0.0] * 50), "the start of the workers"
    assert told([0.0] * 50 + [0.3] * SAMPLES)


def test_a_short_run_is_not_told() -> None:
    assert not told([0.5] * 50, seconds=0.1)
    assert told([0.5] * 50, seconds=1.0)


def test_the_advice_depends_on_workers_and_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_timing.os, "sched_getaffinity", lambda _: range(8))
    advice = [told([0.2] * 50, workers=workers)[0]["advice"] for workers in (0, 2, 8)]
    assert "num_workers=4" in advice[0] and "num_workers, which is 2" in advice[1] and "cpus_per_task" in advice[2]


def test_the_step_timing_passes_its_totals_on() -> None:
    """By the clock that it has anyway."""
    times, seen = StepTimes([], HostClock(), alone=True), []
    times.on_sample = lambda sums: seen.append(len(sums))
    for _ in range(3 * SAMPLE_STEPS):
        times.ask()
        times.begin()
        times.end()
    times.close()
    assert seen == [4, 4]
