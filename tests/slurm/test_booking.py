"""The time that a run waits on a real Slurm, as ``clusterddp/report`` books it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from clusterddp.report.booking import book
from tests.cluster import Cluster
from tests.histories import view
from tests.trainings import Training, events_of
from tests.waiting import story


@pytest.mark.product  # unit/test_booking.py books waits, make soak-booking a whole run
def test_queue_and_hold_are_booked_as_slurm_had_them(cluster: Cluster, runs: Path) -> None:
    """A preempted run is requeued; `Training` lifts the hold. Slurm's times are whole seconds."""
    submitted = time.time()
    training = Training.submit(cluster, runs, "--moments", "first step")
    training.wait_at_moment(0)
    training.preempt()
    training.go(0)
    training.wait_for_attempt(1)
    assert training.finish() == "completed", story(training.run)
    events = training.run.events()
    _, second = events_of(training.run, "allocated")
    (requeued,), (_, started) = events_of(training.run, "requeued"), events_of(training.run, "started")
    assert second["submitted"] == pytest.approx(requeued["time"], abs=2), story(training.run)
    assert second["submitted"] < second["eligible"] <= second["begun"] <= started["time"]
    booking = book(view(events), now=time.time())
    waits = [one for one in booking.intervals if one.begin >= requeued["time"] and one.end <= started["time"]]
    found = {one.category: one.seconds for one in waits}
    assert found["held"] == pytest.approx(second["eligible"] - requeued["time"])
    assert found["launching"] == pytest.approx(started["time"] - second["begun"])
    assert booking.intervals[0].begin == pytest.approx(submitted, abs=5)
    assert booking.seconds()["unknown"] + booking.seconds()["down"] < 0.02 * booking.total_s
