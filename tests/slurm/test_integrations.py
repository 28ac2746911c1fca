"""Training loops of other libraries on a real Slurm, preempted with a grace of 20 s, resume where they stopped."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import clusterddp
from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster
from tests.conftest import Clusters
from tests.packages import require
from tests.ranks.test_integrations import check_resumes
from tests.trainings import events_of
from tests.waiting import story, wait_until

pytestmark = pytest.mark.product  # ranks/test_integrations.py has the same without Slurm
#: Two nodes with a CPU each for everyone.
NODES = {"transformers": "n1,n2", "accelerate": "n1,n3", "lightning": "n2,n3"}


@pytest.fixture(scope="module")
def preempted(clusters: Clusters) -> Iterator[dict[str, RunDirectory]]:
    """A run of each, side by side, in their third step when one job in ``high`` takes the nodes of all."""
    for package in NODES:
        require(package)
    cluster = clusters.get(Clusters.standard)
    cluster.set_grace(20)
    folder = Path(tempfile.mkdtemp(prefix="integrations-", dir=cluster.scratch))
    folder.chmod(0o755)
    os.chown(folder, cluster.uid, -1)
    runs = {package: start(cluster, package, folder / package) for package in NODES}
    for package, run in runs.items():
        wait_until(partial(in_step_3, run), f"{package} at step 3")
        assert run.outcome() is None, story(run)
    cluster.preempt(seconds=0.1)
    for package, run in runs.items():
        wait_until(partial(events_of, run, "signal"), f"{package} to be told")
        (marks(run) / "wait").unlink()
    yield runs
    cluster.drain_jobs()


def in_step_3(run: RunDirectory) -> bool:
    """Both ranks are; or the run is over."""
    return len(list(marks(run).glob("[01]"))) == 2 or run.outcome() is not None


def marks(run: RunDirectory) -> Path:
    return run.path.with_suffix(".marks")


def start(cluster: Cluster, package: str, folder: Path) -> RunDirectory:
    """Submits it, to wait in its third step."""
    run = RunDirectory(folder)
    marks(run).mkdir()
    os.chown(marks(run), cluster.uid, -1)
    (marks(run) / "wait").touch()
    script = ["-m", "clusterddp.submit", f"tests/scripts/with_{package}.py", "--run-dir", run.path]
    shape = f"--nodes 2 --gpus 1 --device cpu --partition low --nodelist {NODES[package]}".split()
    cluster.run([cluster.python, *script, *shape, "--", folder.with_suffix(".out"), marks(run)], cwd=cluster.source)
    return run


@pytest.mark.parametrize("package", NODES)
def test_a_preempted_run_is_requeued_and_resumes_at_the_step_where_it_stopped(
    preempted: dict[str, RunDirectory], package: str
) -> None:
    """Neither the job nor a step is lost, and no step is made twice."""
    run = preempted[package]
    check_resumes(clusterddp.Handle(run.path))
    (requeued,) = events_of(run, "requeued")
    assert requeued["cause"] == "preempted", story(run)
