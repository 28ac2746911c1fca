"""Advice about where a run loses time: only with figures that support it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from clusterddp.jobdef.job import Checkpointing, Job
from clusterddp.report.booking import book
from clusterddp.report.efficiency import advice, lost_nodes
from tests.histories import view

BEGAN = 1_795_000_000
JOB = Job(name="x", module="x", checkpoint=Checkpointing(every_s=60))


def advised(events: list[dict[str, Any]], job: Job = JOB) -> list[str]:
    return advice(job, book(view(events), events[-1]["time"], state="failed"), view(events))


def training(interruptions: int, every: float, blocked: float) -> list[dict[str, Any]]:
    """Ten hours of training between interruptions without notice."""
    events: list[dict[str, Any]] = []
    for attempt in range(interruptions + 1):
        time = BEGAN + 36_000.0 * attempt
        begun: Mapping[str, Any] = {"event": "resumed", "redone": 5} if attempt else {"event": "training"}
        events.append({"time": time, "attempt": attempt, "event": "started", "pid": 7})
        events.append({"time": time, "attempt": attempt, **begun})
        events.append({"time": time, "attempt": attempt, "event": "phase", "phase": "training"})
        for number in range(1, int(36_000 / every)):
            saved = {"event": "checkpoint", "step": number, "blocked_s": blocked, "durable_s": blocked}
            events.append({"time": time + every * number, "attempt": attempt, **saved})
        events.append({"time": time + 35_999, "attempt": attempt, "event": "restarted"})
    return events


def test_a_better_interval_is_advised_if_it_saves_something() -> None:
    """sqrt(2 x 3 s x 12 h) is 509 s; with few interruptions, or where little is lost, there is no advice."""
    (words,) = advised(training(5, every=60, blocked=3))
    assert words.startswith("checkpoint.every: 4") and "3 s" in words and "60 s apart" in words
    assert advised(training(2, every=60, blocked=3)) == []
    assert advised(training(5, every=60, blocked=0.01)) == []
    assert advised(training(5, every=500, blocked=3)) == []


def test_saves_that_are_recorded_at_the_same_moment_are_not_an_interval() -> None:
    """As in a history in which another program doubled the lines."""
    events = training(5, every=60, blocked=3)
    for event in events:
        event["time"] = BEGAN + 36_000.0 * event["attempt"]
    assert not any("checkpoint.every" in words for words in advised(events))


def test_a_hold_that_takes_long_is_named() -> None:
    events = [
        {"time": 0.0, "attempt": 0, "event": "started", "job": "7"},
        {"time": 1000.0, "attempt": 0, "event": "requeued", "reason": "preempted"},
        {"time": 1130.0, "attempt": 1, "event": "started", "job": "7"},
        {"time": 1130.0, "attempt": 1, "event": "allocated", "eligible": 1121.0, "begun": 1125.0},
        {"time": 2000.0, "attempt": 1, "event": "completed"},
    ]
    (words,) = advised(events)
    assert "held the run 1 time after a requeue, for 2 min on average, 6% of its time" in words
    assert "With `policy: resubmit`, the run continues in a new job" in words
    (words,) = advised(events, replace(JOB, policy="resubmit"))  # which is set: a preemption without grace
    by_slurm = {**events[1], "event": "stopped", "then": "requeued by Slurm"}
    assert [words] == advised([events[0], by_slurm, *events[2:]])
    assert words.endswith("`clusterddp wait --resubmit` lifts the hold")


def test_steps_that_are_lost_in_spite_of_a_notice_are_named() -> None:
    events = [
        {"time": 0.0, "attempt": 0, "event": "started", "job": "7"},
        {"time": 9.0, "attempt": 0, "event": "checkpoint", "step": 5, "blocked_s": 0.1, "durable_s": 41.0},
        {"time": 99.0, "attempt": 0, "event": "requeued", "cause": "preempted", "step": 80, "checkpoint": 5},
        {"time": 199.0, "attempt": 1, "event": "completed"},
    ]
    (words,) = advised(events)
    assert words.startswith("1 announced stop lost steps") and "took 41 s" in words and "120 s" in words
    for hung in (
        {"event": "overdue", "seconds": 57.0},
        {"event": "hung", "what": "rank 3 (n2) is stuck"},
    ):
        (words,) = advised([*events[:2], {"time": 98.0, "attempt": 0, **hung}, *events[2:]])
        assert words.startswith("1 announced stop lost steps, because a step did not end") and "save" not in words


def resubmitted(wait_s: float, *lost: dict[str, Any], **started: Any) -> list[dict[str, Any]]:
    """Ten thousand seconds in one job, a wait, and the rest of 30,000 in the next job."""
    start = {"event": "started", "job": "1", **started}
    ended = {"time": BEGAN + 10_000, "attempt": 0, "event": "resubmitted", "job": "2"}
    again = {"time": BEGAN + 10_000 + wait_s, "attempt": 1, **start}
    end = {"time": BEGAN + 30_000, "attempt": 1, "event": "failed"}
    return [{"time": BEGAN, "attempt": 0, **start}, *lost, ended, again, end]


def cost(*runs: list[dict[str, Any]]) -> dict[str, float] | None:
    """What lost nodes cost these histories."""
    return lost_nodes(map(view, runs), BEGAN + 1e6)


LOST = {"time": BEGAN + 9_990, "attempt": 0, "event": "node_lost", "node": "n2", "suspect": "n2"}


def test_spare_nodes_are_advised_by_the_queue_after_lost_nodes() -> None:
    """Not where there are some, where the run waited for another reason, or for a moment."""
    words = "spare_nodes: 1 would have saved about 2 h 00 min in the queue, where the run waited after it lost 1 node"
    assert advised(resubmitted(7200, LOST)) == [words]
    assert advised(resubmitted(7200)) == advised(resubmitted(20, LOST)) == []
    assert advised(resubmitted(7200, LOST), replace(JOB, spare_nodes=1)) == []


def test_lost_nodes_are_summed_over_runs_with_what_spare_nodes_would_have_cost() -> None:
    """The spare nodes of runs that lose no node cost as much. What follows the records of a run does not count."""
    unaffected, live = resubmitted(7200), resubmitted(3600, LOST)[:-2]
    runs = [resubmitted(7200, LOST), unaffected, live]
    assert cost(*runs) == {
        "runs": 3,
        "jobs": 2,
        "queued_s": 7200,
        "spare_node_s": 2 * (30_000 - 7200) + 10_000,
    }
    local = [{key: value for key, value in event.items() if key != "job"} for event in resubmitted(60, LOST)]
    spare = resubmitted(60, LOST, spares=["n3"])
    assert cost(*runs, local, spare) == cost(*runs)
    assert cost(unaffected, local, spare) is None
