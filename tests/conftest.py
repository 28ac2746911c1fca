"""Fixtures that several test files share."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import clusterddp
from clusterddp import reporter
from clusterddp.process import descendants
from clusterddp.rundir import files
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.worker import rank_process
from clusterddp.worker.rank_process import RankProcess
from tests import WITH_CLUSTER
from tests.cluster import Cluster, ClusterConfig, daemons, unavailable
from tests.histories import check_histories
from tests.other_user import run_as_other
from tests.trainings import Training
from tests.waiting import story, wait_until

pytest_plugins = ["tests.plugin", "tests.wording", "tests.fake_slurm"]

Launch = Callable[..., clusterddp.Handle]
#: Marks of tests that take hours.
ON_REQUEST = ("soak", "chaos")
#: Threads that the tests of a file may leave behind.
MOST_LEFT = 8

# A shell starts its background jobs with SIGINT ignored, nohup with SIGHUP, and every command that a test starts would
# inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the tests that need the cluster, of which there is one: ``make test`` runs the others beside them.

    Those marked for the full product are left to ``make test-product``, and those in ON_REQUEST run where ``-m`` names
    their mark.
    """
    unasked = [mark for mark in ON_REQUEST if mark not in config.option.markexpr]
    # By mark: an item's keywords include the names of its folders.
    items[:] = [item for item in items if not any(item.get_closest_marker(mark) for mark in unasked)]
    if "CLUSTERDDP_TEST_PRODUCT" not in os.environ:
        items[:] = [item for item in items if "product" not in item.keywords]
    for item in items:
        if "clusters" in getattr(item, "fixturenames", ()):
            if item.path.parent.name not in WITH_CLUSTER:
                raise pytest.UsageError(f"{item.nodeid} uses the cluster: move it to tests/slurm")
            item.add_marker("slurm")


class Clusters:
    """The real Slurm of this session: one at a time, the one asked for last; another configuration replaces it."""

    #: What most tests need; fewer CPUs than the machine has, so that nothing waits for one.
    standard = ClusterConfig(nodes=3, cpus=2, release=os.environ.get("CLUSTERDDP_TEST_RELEASE"))

    def __init__(self) -> None:
        self._up: Cluster | None = None

    def get(self, config: ClusterConfig) -> Cluster:
        """The cluster with this configuration. In CI its absence is a failure, elsewhere a skip."""
        reason = unavailable()
        if reason is not None:
            (pytest.fail if "CI" in os.environ else pytest.skip)(reason)
        if self._up is None or self._up.config != config:
            self.down()
            self._up = Cluster.up(config)
        return self._up

    def down(self) -> None:
        """Takes it down, if one is up."""
        if self._up is not None:
            self._up.down()
            self._up = None


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> RankProcess:
    """The state of this process as a rank, without a supervisor. What a test sets in it is gone afterwards."""
    made = RankProcess()
    monkeypatch.setattr(rank_process, "_current", made)
    return made


@pytest.fixture(autouse=True)
def _listed_events(request: pytest.FixtureRequest) -> Iterator[None]:
    """No run of a test writes an event with a field that the protocol does not list."""
    yield
    for name in {"tmp_path", "runs"} & (request.node.funcargs or {}).keys():  # None after an interruption
        check_histories(request.node.funcargs[name])


@pytest.fixture(autouse=True, scope="module")
def _ended_threads() -> Iterator[None]:
    """The threads that a file's tests have started end with them, but for a few in calls that never return.

    A few thousand made the tests after them slow.
    """
    before = set(threading.enumerate())
    yield
    left = lambda: [thread.name for thread in threading.enumerate() if thread not in before]  # noqa: E731
    with suppress(AssertionError):
        wait_until(lambda: len(left()) <= MOST_LEFT, "them to end", 10)
    assert len(left()) <= MOST_LEFT, f"threads that this file's tests have started and not ended: {left()}"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run that has only just been created."""
    run = RunDirectory(tmp_path / "run")
    run.create()
    return run


@pytest.fixture
def no_held_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without those of other tests: a process keeps only so many open."""
    monkeypatch.setattr(files, "_held", {})


class _Terminal:
    """A module or stream, parts of which are others."""

    def __init__(self, of: Any, **parts: Any) -> None:
        self._of = of
        self.__dict__.update(parts)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._of, name)  # now: pytest replaces sys.stderr
        return _Terminal(found, isatty=lambda: True) if name == "stderr" else found


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> list[str | Callable[[], str]]:
    """This process seems to run in a terminal. The list is for what its user types, or a function that returns it."""
    lines: list[str | Callable[[], str]] = []

    def readline() -> str:
        line = lines.pop(0)
        return line if isinstance(line, str) else line()

    keyboard = SimpleNamespace(isatty=lambda: True, readline=readline)
    monkeypatch.setattr(reporter, "sys", _Terminal(sys, stdin=keyboard))
    return lines


@pytest.fixture(scope="session")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters]:
    """The session's clusters; for tests that need a configuration of their own."""
    daemons.filled_database = tmp_path_factory.mktemp("database")
    clusters = Clusters()
    yield clusters
    clusters.down()


@pytest.fixture
def cluster(request: pytest.FixtureRequest, clusters: Clusters) -> Iterator[Cluster]:
    """The cluster that the test's file configures as ``CLUSTER``, or the standard one with a grace of 20 s.

    It is idle at the start. The test's jobs are ended afterwards.
    """
    own = getattr(request.module, "CLUSTER", None)
    if own is not None and "uninterrupted_training" in request.fixturenames:
        request.getfixturevalue("uninterrupted_training")  # on the standard cluster, which goes down for this one
    up = clusters.get(own or Clusters.standard)
    if own is None:
        up.set_grace(20)
    yield up
    up.drain_jobs()


@pytest.fixture
def runs_on(request: pytest.FixtureRequest) -> Callable[[Cluster], Path]:
    """Makes a folder for run directories on a cluster, of the user who submits, the same on all nodes."""

    def make(cluster: Cluster) -> Path:
        prefix = re.sub(r"\W+", "-", request.node.name)[:40]
        folder = Path(tempfile.mkdtemp(prefix=f"{prefix}-", dir=cluster.scratch))
        folder.chmod(0o755)
        os.chown(folder, cluster.uid, -1)
        return folder

    return make


@pytest.fixture
def runs(cluster: Cluster, runs_on: Callable[[Cluster], Path]) -> Path:
    """Such a folder on the standard cluster."""
    return runs_on(cluster)


@pytest.fixture(scope="session")
def uninterrupted_training(clusters: Clusters, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """tests/scripts/train.py on the cluster without a preemption, for comparison to the last bit."""
    cluster = clusters.get(Clusters.standard)
    folder = cluster.scratch / "uninterrupted-training"
    folder.mkdir()
    os.chown(folder, cluster.uid, -1)
    training = Training.submit(cluster, folder)
    assert training.finish() == "completed", story(training.run)
    kept = tmp_path_factory.mktemp("reference") / "run"  # the cluster's folders are deleted with it
    shutil.copytree(training.run.path, kept)
    return RunDirectory(kept)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Launches locally on two CPU ranks, in ``tmp_path/run`` unless told otherwise; no process is left behind."""
    handles: list[clusterddp.Handle] = []

    def start(target: Any, *args: Any, **options: Any) -> clusterddp.Handle:
        usual = {"gpus_per_node": 2, "device": "cpu", "local": True, "run_dir": tmp_path / "run"}
        handles.append(clusterddp.launch(target, *args, **{**usual, **options}))
        return handles[-1]

    yield start
    for pid, command in descendants(os.getpid()).items():
        if "clusterddp.submit" in command and any(str(handle.path) in command for handle in handles):
            os.kill(pid, signal.SIGKILL)  # supervisor and ranks die with it


@pytest.fixture(scope="session")
def _another_user() -> None:
    """Skips where this process cannot be another user, or another user cannot run what it runs."""
    if os.geteuid() != 0:
        pytest.skip("only root can start a process of another user")
    if run_as_other(sys.executable, "-c", "import torch, clusterddp").returncode:
        pytest.skip("another user cannot read this Python's packages")


@pytest.fixture
def open_folder(_another_user: None) -> Iterator[Path]:
    """A folder that every user may write, with the sticky bit, as /tmp; pytest's own are closed to others."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)
