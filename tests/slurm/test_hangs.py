"""Hangs on a real Slurm: a rank on another node, a whole step, and a suspended job, which does not hang."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster
from tests.trainings import Training, check_same_run, events_of
from tests.waiting import story, wait_until

WATCHDOG = ["--set", "watchdog.step_s=4", "--set", "checkpoint.every=5 steps"]
#: Longer than the watchdog waits: its timeout and three heartbeats.
LONG_S = 10.0


def stop_ranks(training: Training, attempt: int, *nodes: str) -> None:
    """SIGSTOP once the attempt has made a few steps, and is past its start."""
    made = lambda: [line for line in training.run.metrics() if line["attempt"] == attempt]  # noqa: E731
    training.wait(lambda: len(made()) >= 10, f"steps of attempt {attempt}")
    for process in [process for node in nodes for process in training.ranks_on(node)]:
        process.kill(signal.SIGSTOP)
    training.wait(lambda: attempt + 1 in training.run.attempts(), f"attempt {attempt + 1}")


@pytest.mark.product  # ranks/test_hangs.py has a rank that hangs
def test_a_rank_that_is_stopped_on_another_node_and_then_all_of_them_cost_a_restart_in_place_each(
    cluster: Cluster, runs: Path, uninterrupted_training: RunDirectory
) -> None:
    """The one is named with its node; no rank can exit on its own when all are stopped."""
    training = Training.submit(cluster, runs, "--pause", "0.2", options=WATCHDOG)
    stop_ranks(training, 0, "n2")
    stop_ranks(training, 1, "n1", "n2")
    assert training.finish() == "completed", story(training.run)
    one, both = events_of(training.run, "hung")
    assert (one["late"], one["host"], both["late"]) == ([1], "n2", [0, 1])
    assert ". The others wait in all_reduce" in one["what"], (training.run.attempt_logs(0) / "rank-0.err").read_text()
    assert "in all_reduce" in (training.run.attempt_logs(0) / "rank-0.err").read_text()
    assert [event["reason"] for event in events_of(training.run, "restarted")] == [
        "rank 1 (n2) hung",
        "rank 0 (n1) hung",
    ]
    assert len({event["job"] for event in events_of(training.run, "started")}) == 1
    check_same_run(training.run, uninterrupted_training, redone=True)


@pytest.mark.product  # unit/test_decide.py and the simulation have suspended jobs
def test_a_job_that_is_suspended_for_longer_than_the_watchdog_waits_does_not_hang(
    cluster: Cluster, runs: Path, uninterrupted_training: RunDirectory
) -> None:
    """scontrol suspend stops supervisor and ranks; their time stands still."""
    training = Training.submit(cluster, runs, "--pause", "0.2", options=WATCHDOG)
    training.wait(lambda: len(training.run.metrics()) >= 10, "steps")
    cluster.root(["scontrol", "suspend", training.job_id])
    cluster.wait_for(training.job_id, lambda job: job.get("JobState") == "SUSPENDED", "to be suspended")
    suspended = time.monotonic()
    wait_until(lambda: time.monotonic() - suspended > LONG_S, "time to pass")
    cluster.root(["scontrol", "resume", training.job_id])
    assert training.finish() == "completed", story(training.run)
    assert (training.run.attempts(), events_of(training.run, "hung")) == ([0], []), story(training.run)
    check_same_run(training.run, uninterrupted_training)
