"""Spare nodes on a real Slurm: a run whose node is lost, fails or is drained continues in the same job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterddp.hostlist import expand
from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster, ClusterConfig
from tests.conftest import Clusters
from tests.trainings import Training, check_same_run, events_of
from tests.waiting import story, wait_for_step

#: Four nodes for the run and a spare one, and a node that a new job can have instead.
CONFIG = ClusterConfig(nodes=6, cpus=2, slurmdbd=False, slurmd_timeout=20, release=Clusters.standard.release)
INTERVAL = 5
SPARE = ["--spare-nodes", "1", "--set", f"checkpoint.every={INTERVAL} steps"]


@pytest.fixture
def cluster(clusters: Any, uninterrupted_training: RunDirectory) -> Iterator[Cluster]:
    """In place of the standard one, after the reference was made there."""
    up = clusters.get(CONFIG)
    yield up
    up.drain_jobs()


def ranks_on(cluster: Cluster, node: str) -> list[str]:
    """The command lines of ranks on a node; srun, and the guard, have others."""
    commands = (process.command() for process in cluster.processes(node))
    return [command for command in commands if "clusterddp.worker" in command and "srun" not in command]


def nodes_of(training: Training) -> list[list[str]]:
    """The nodes of each attempt's ranks."""
    return [expand(event["nodes"]) for event in events_of(training.run, "started")]


def check_continued(training: Training, reference: RunDirectory, *, steps: int = INTERVAL) -> None:
    """The run completed in one job, with the same bits, and has repeated few steps."""
    assert training.finish() == "completed", story(training.run)
    assert {event["job"] for event in events_of(training.run, "started")} == {training.job_id}
    assert all(event["redone"] <= steps for event in events_of(training.run, "resumed")), story(training.run)
    check_same_run(training.run, reference, redone=steps > 0)


def test_ranks_of_a_lost_node_continue_on_the_spare_one_in_the_same_job(
    cluster: Cluster, runs: Path, uninterrupted_training: RunDirectory
) -> None:
    """Its cable is cut: its ranks live on until they see the next attempt. Slurm then takes it from the job."""
    training = Training.submit(cluster, runs, "--pause", "0.3", options=SPARE)
    wait_for_step(training.run, 7)
    assert nodes_of(training) == [["n1", "n2"]]
    cluster.cut("n2")
    training.wait(lambda: len(nodes_of(training)) == 2, "attempt 1", 40)
    assert nodes_of(training)[1] == ["n1", "n3"]
    training.wait(lambda: not ranks_on(cluster, "n2"), "the ranks on n2 to end")
    check_continued(training, uninterrupted_training)
    (moved,) = events_of(training.run, "moved")
    assert moved["why"] == "node n2 is lost: the ranks continue on the spare node n3"
