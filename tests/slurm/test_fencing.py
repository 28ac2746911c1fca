"""Two live attempts of one run: the older one exits, and its late writes are harmless."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster, ClusterConfig
from tests.conftest import Clusters
from tests.trainings import Training, check_same_run, events_of
from tests.waiting import story, wait_for_step


@pytest.mark.product  # test_spares.py loses the batch host, ranks/test_resume.py has a superseded rank
@pytest.mark.parametrize("node", [pytest.param("n2", id="a plain node"), pytest.param("n1", id="the batch host")])
def test_a_node_cut_off_for_long_loses_its_run_to_a_new_attempt_and_its_ranks_exit(
    cluster: Cluster, runs: Path, uninterrupted_training: RunDirectory, node: str
) -> None:
    """Slurm gives up the node and starts the run elsewhere; the ranks that are cut off exit on their own."""
    training = Training.submit(cluster, runs, "--pause", "0.1", options=["--set", "checkpoint.every=5 steps"])
    wait_for_step(training.run, 7)
    cluster.cut(node)
    training.wait(lambda: 1 in training.run.attempts(), "attempt 1", 150)
    training.wait(lambda: not training.ranks_on(node), f"the ranks on {node} to end", 90)
    assert training.finish() == "completed", story(training.run)
    history = training.run.events()
    cluster.heal(node)
    cluster.wait_job(training.job_id, {"COMPLETED"})
    assert training.run.events() == history
    assert training.run.attempts() == [0, 1]
    assert events_of(training.run, "resumed")[0]["step"] >= 5
    check_same_run(training.run, uninterrupted_training, redone=True)


@pytest.mark.product
def test_no_node_is_lost_after_the_batch_host_was_cut_off_for_a_while(
    clusters: Clusters, runs_on: Callable[[Cluster], Path], uninterrupted_training: RunDirectory
) -> None:
    """All other nodes fell silent, and so did the controller. The spare node is not needed."""
    patient = ClusterConfig(nodes=3, cpus=2, slurmdbd=False, slurmd_timeout=200, release=Clusters.standard.release)
    cluster = clusters.get(patient)
    options = ["--spare-nodes", "1", "--set", "checkpoint.every=5 steps"]
    training = Training.submit(cluster, runs_on(cluster), "--pause", "0.1", options=options)
    wait_for_step(training.run, 7)
    cluster.cut("n1")
    training.wait(lambda: events_of(training.run, "controller_away"), "the supervisor to notice", 90)
    cluster.heal("n1")
    assert training.finish() == "completed", story(training.run)
    assert not events_of(training.run, "node_lost") + events_of(training.run, "moved"), story(training.run)
    assert not [event for event in training.run.events() if "suspect" in event]
    assert training.run.attempts() == [0, 1]
    check_same_run(training.run, uninterrupted_training, redone=True)
    cluster.drain_jobs()


def test_a_second_start_of_a_held_run_is_refused_and_disturbs_nothing(
    cluster: Cluster, runs: Path, uninterrupted_training: RunDirectory
) -> None:
    """sbatch of the same script by hand, while the run trains on other nodes of the cluster."""
    training = Training.submit(cluster, runs, "--pause", "0.1")
    wait_for_step(training.run, 3)
    cluster.wait_job(training.job_id, {"RUNNING"})  # ranks may train while it is still CONFIGURING
    assert training.run.attempts() == [0], story(training.run)  # otherwise another cause is possible
    script = (training.run.batch_script).read_text().replace("--nodes=2", "--nodes=1")
    by_hand = runs / "by-hand.sbatch"
    by_hand.write_text(script)
    second = cluster.run(["sbatch", "--parsable", by_hand]).stdout.strip()
    cluster.wait_job(second, {"FAILED"})
    log = (training.run.logs / f"job-{second}.log").read_text()
    assert f"held by job {training.job_id} (RUNNING on n[1-2])" in log
    assert training.finish() == "completed", story(training.run)
    assert training.run.attempts() == [0], story(training.run)
    check_same_run(training.run, uninterrupted_training)
