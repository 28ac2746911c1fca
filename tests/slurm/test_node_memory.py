"""What runs remember of failed nodes, on a real Slurm with as many nodes as a tenth of them needs to be one."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster, ClusterConfig
from tests.conftest import Clusters
from tests.trainings import Training, events_of
from tests.waiting import wait_for_step

CLUSTER = ClusterConfig(nodes=10, cpus=2, slurmdbd=False, release=Clusters.standard.release)


def submit(cluster: Cluster, run: RunDirectory, *options: str) -> tuple[Training, str]:
    """A run of one rank, and what ``submit`` said."""
    shape = ["--nodes", "1", "--gpus", "1", "--device", "cpu", "--partition", "low", *options]
    command = [cluster.python, "-m", "clusterddp.submit", "tests/scripts/train.py", "--run-dir", run.path, *shape]
    done = cluster.run([*command, "--", "--pause", "0.2"], cwd=cluster.source)
    return Training(cluster, run.path.parent, run, done.stdout.strip()), done.stderr


@pytest.mark.product
def test_a_node_on_which_two_runs_failed_is_left_out_by_the_third(cluster: Cluster, runs: Path) -> None:
    """Which says so; with --no-node-memory it is used."""
    for name in ("first", "second"):
        training, said = submit(cluster, RunDirectory(runs / name), "--nodelist", "n2")
        assert "avoids" not in said
        wait_for_step(training.run, 3)
        training.ranks_on("n2")[0].kill(signal.SIGKILL)
        training.wait(lambda: events_of(training.run, "rank_failed"), "the failure")  # noqa: B023
        cluster.run([cluster.python, "-m", "clusterddp", "cancel", training.run.path], cwd=cluster.source)
    third, said = submit(cluster, RunDirectory(runs / "third"))
    assert "The job avoids n2 because several runs failed there in the last few days" in said
    assert cluster.job(third.job_id)["ExcNodeList"] == "n2"
    listed = cluster.run(
        [cluster.python, "-m", "clusterddp", "doctor", "--failed-nodes", runs], cwd=cluster.source
    ).stdout
    assert "n2" in listed and "n1" not in listed
    fourth, said = submit(cluster, RunDirectory(runs / "fourth"), "--no-node-memory", "--nodelist", "n2")
    assert "avoids" not in said and cluster.job(fourth.job_id)["ExcNodeList"] == "(null)"
