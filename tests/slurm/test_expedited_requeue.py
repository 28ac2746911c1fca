"""Jobs that Slurm starts again at once after a requeue: Slurm 25.11 and newer, where the site allows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster, ClusterConfig
from tests.conftest import Clusters
from tests.slurm.test_spares import die
from tests.trainings import Training, check_same_run, events_of
from tests.waiting import story, wait_for_outcome, wait_for_step, wait_until

#: An ordinary requeue is followed by a hold of two minutes.
CONFIG = ClusterConfig(nodes=3, cpus=2, slurmdbd=False, cred_expire=120, expedite=True, release="sid")
EXPEDITE = ["--set", "expedite_requeue=true"]


@pytest.fixture
def cluster(clusters: Any, uninterrupted_training: RunDirectory) -> Iterator[Cluster]:
    if Clusters.standard.release != "sid":
        pytest.skip("needs CLUSTERDDP_TEST_RELEASE=sid")
    up = clusters.get(CONFIG)
    yield up
    up.drain_jobs()


def finish_without_a_hold(training: Training, reference: RunDirectory, redone: bool) -> None:
    wait_until(lambda: 1 in training.run.attempts(), f"attempt 1\n{story(training.run)}", 60)
    assert wait_for_outcome(training.run) == "completed", story(training.run)
    assert {event["job"] for event in events_of(training.run, "started")} == {training.job_id}
    check_same_run(training.run, reference, redone=redone)


def test_a_preempted_run_continues_without_a_hold(
    cluster: Cluster, runs: Path, uninterrupted_training: RunDirectory
) -> None:
    training = Training.submit(cluster, runs, "--pause", "0.1", options=EXPEDITE)
    wait_for_step(training.run, 5)
    cluster.preempt(seconds=0.1)
    finish_without_a_hold(training, uninterrupted_training, redone=False)


def test_a_run_whose_first_node_dies_continues_as_soon_as_slurm_notices_it(
    cluster: Cluster, runs: Path, uninterrupted_training: RunDirectory
) -> None:
    training = Training.submit(cluster, runs, "--pause", "0.2", options=EXPEDITE)
    wait_for_step(training.run, 5)
    die(cluster, "n1")
    finish_without_a_hold(training, uninterrupted_training, redone=True)
    assert "n1" not in events_of(training.run, "started")[1]["nodes"]


def test_the_job_of_a_run_that_fails_is_not_requeued_and_held(cluster: Cluster, runs: Path) -> None:
    """Slurm does so with a job whose script exits with a code other than 0."""
    (runs / "fails.py").write_text("raise ValueError('no')\n")
    run, shape = RunDirectory(runs / "run"), "--nodes 2 --gpus 1 --device cpu --partition low".split()
    command = [cluster.python, "-m", "clusterddp.submit", runs / "fails.py", "--run-dir", run.path, *shape, *EXPEDITE]
    job_id = cluster.run(command, cwd=cluster.source).stdout.strip()
    assert wait_for_outcome(run) == "failed"
    cluster.wait_for(job_id, lambda job: job.get("JobState") not in ("RUNNING", "COMPLETING"), "to end")
    assert cluster.job(job_id)["JobState"] == "FAILED"
