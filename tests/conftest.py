"""Fixtures that several test files share."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp.rundir import RunDirectory
from tests.cluster import Cluster, ClusterConfig, unavailable
from tests.trainings import Training
from tests.waiting import story


@pytest.fixture(scope="session")
def cluster_up() -> Iterator[Cluster]:
    """A real Slurm of three nodes, for the whole session. In CI its absence is a failure, elsewhere a skip."""
    reason = unavailable()
    if reason is not None and "CI" in os.environ:
        pytest.fail(reason)
    if reason is not None:
        pytest.skip(reason)
    with Cluster.up(ClusterConfig(nodes=3, cpus=2)) as up:
        yield up


@pytest.fixture
def cluster(cluster_up: Cluster) -> Iterator[Cluster]:
    """The cluster, idle and with a grace of 20 s at the start of the test; its jobs are ended afterwards."""
    cluster_up.set_grace(20)
    yield cluster_up
    cluster_up.drain_jobs()


@pytest.fixture
def runs(cluster: Cluster, request: pytest.FixtureRequest) -> Path:
    """A folder for run directories, of the user who submits, the same on all nodes."""
    prefix = re.sub(r"\W+", "-", request.node.name)[:40]
    folder = Path(tempfile.mkdtemp(prefix=f"{prefix}-", dir=cluster.scratch))
    folder.chmod(0o755)
    os.chown(folder, cluster.uid, -1)
    return folder


@pytest.fixture(scope="session")
def uninterrupted_training(cluster_up: Cluster) -> RunDirectory:
    """tests/scripts/train.py on the cluster without a preemption, for comparison to the last bit."""
    folder = cluster_up.scratch / "uninterrupted-training"
    folder.mkdir()
    os.chown(folder, cluster_up.uid, -1)
    training = Training.submit(cluster_up, folder)
    assert training.finish() == "completed", story(training.run)
    return training.run
