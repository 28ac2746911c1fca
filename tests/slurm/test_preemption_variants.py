"""The same promise on differently configured clusters: process tracking, signals, and what to preempt."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests.runs_on_disk import outcome_of
from tests.trainings import MOMENTS, Training, check_same_run, preempt_at_each
from tests.waiting import story

#: proctrack, user signal, preemption by QOS, grace, loader workers: both values of each, with the standard cluster of
#: the other tests, whose runs have no workers.
PRODUCT = list(itertools.product(("cgroup", "linuxproc"), (False, True), (False, True), (20, 0), (0, 2)))


@pytest.mark.product  # test_preemption.py has the standard cluster
@pytest.mark.parametrize(("proctrack", "user_signal", "qos", "grace", "workers"), PRODUCT)
def test_a_preempted_run_is_the_same_run_on_a_cluster_set_up_differently(
    clusters: Any,
    runs_on: Any,
    uninterrupted_training: RunDirectory,
    proctrack: str,
    user_signal: bool,
    qos: bool,
    grace: int,
    workers: int,
) -> None:
    """Preempted at every moment."""
    config = dataclasses.replace(clusters.standard, proctrack=proctrack, user_signal=user_signal, qos=qos)
    cluster = clusters.get(config)
    cluster.set_grace(grace)
    options = ["-q", "low"] if qos else []
    script = ["--moments", ",".join(MOMENTS), "--workers", str(workers)]
    training = Training.submit(cluster, runs_on(cluster), *script, options=options)
    preempt_at_each(training, MOMENTS)
    assert training.finish() == "completed", story(training.run)
    check_same_run(training.run, uninterrupted_training)
    left = [process for node in cluster.nodes for process in cluster.processes(node) if "train.py" in process.command()]
    assert left == []
    cluster.drain_jobs()


# On a cluster of its own. unit/test_waiting.py has when a command that waits lifts a hold.
@pytest.mark.product
def test_a_watcher_lifts_the_hold_after_a_requeue(clusters: Any, runs_on: Any) -> None:
    """``submit --wait`` lifts it, though the hold is longer than the test waits, and ends with the run."""
    cluster = clusters.get(dataclasses.replace(clusters.standard, cred_expire=120))
    training = Training.submit(cluster, runs_on(cluster), "--moments", "first step")
    watcher = cluster.popen([cluster.python, "-m", "clusterddp", "wait", "--resubmit", training.run.path], stderr=-1)
    training.wait_at_moment(0)
    training.preempt()
    training.go(0)
    _, words = watcher.communicate(timeout=90)
    assert watcher.returncode == 0, words
    assert f"lifted Slurm's hold on job {training.job_id} after the requeue" in words
    assert (outcome_of(training.run) or {})["attempts"] == 2
    cluster.drain_jobs()
