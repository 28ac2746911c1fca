"""Runs at a site that refuses, hides or renames what others have: with a configuration file, one command starts each.

Sites differ in what they forbid. `OBSTACLES` has each of it by itself, and what a user writes about it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster, ClusterConfig
from tests.conftest import Clusters
from tests.image import install_apptainer
from tests.runs_on_disk import outcome_of
from tests.trainings import Training, events_of
from tests.waiting import story, wait_for_outcome

#: Where the ranks of the first attempt wait for a preemption, and the end.
STOP, STEPS = 3, 6
SCRIPT = "tests/scripts/counts_together.py"


@dataclass(frozen=True)
class Obstacle:
    """What a cluster has, what a user writes into the configuration file, and what the user's shell exports. ``image``:
    whether the ranks run in an image without clusterddp."""

    cluster: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    image: bool = False


OBSTACLES = {
    "a plugin's rules": Obstacle(
        {"rules": True, "gpus": 0}, {"constraint": "train", "gpu_request": "none", "mem": "none"}
    ),
    "no GPUs known": Obstacle({"gpus": 0}, {"gpu_request": "none"}),
    "own names are loopback": Obstacle({"loopback_names": True}),
    "full names": Obstacle({"domain": "site.example"}),
    "a network for ranks": Obstacle({"rank_network": True}, {"interface": "ib0"}),
    "nothing exported": Obstacle({}, {}, {"SBATCH_EXPORT": "NONE"}),
    "slurm.conf elsewhere": Obstacle({"conf_elsewhere": True}),
    "two threads per core": Obstacle({"threads": 2}, {"sbatch": {"hint": "nomultithread"}}),
    "a home of its own": Obstacle({"private_home": True}),
    "an image": Obstacle(image=True),
}


def together(*obstacles: Obstacle) -> Obstacle:
    """All at once."""
    cluster, defaults, environment = (
        {key: value for one in obstacles for key, value in getattr(one, part).items()}
        for part in ("cluster", "defaults", "environment")
    )
    return Obstacle(cluster, defaults, environment, any(one.image for one in obstacles))


EVERYTHING = together(*OBSTACLES.values())
CASES = [
    *(pytest.param(obstacle, id=name, marks=pytest.mark.product) for name, obstacle in OBSTACLES.items()),
    pytest.param(EVERYTHING, id="everything"),
]


def site(obstacle: Obstacle, clusters: Clusters) -> Cluster:
    """A cluster of two nodes with the obstacle. The user's configuration file says what the site's pages do."""
    standard = ClusterConfig(cpus=4, slurmdbd=False, release=Clusters.standard.release)
    cluster = clusters.get(replace(standard, **obstacle.cluster))
    values = {"env": {"GREETING": "hello"}, **obstacle.defaults, **(image_of(cluster) if obstacle.image else {})}
    section = {"clusters": {"clusterddp": values}}
    file = Path(cluster.environment["HOME"], ".config", "clusterddp", "config.yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(section))
    for path in (file, *file.parents[:2]):
        os.chown(path, cluster.uid, -1)
    return cluster


def image_of(cluster: Cluster) -> dict[str, Any]:
    """An image that has neither clusterddp nor the checkout, and what a user writes about it."""
    folder = Path(tempfile.mkdtemp(prefix="image-", dir=cluster.scratch))
    image = install_apptainer(cluster, folder)
    for path in (folder, image):
        path.chmod(0o755)
        os.chown(path, cluster.uid, -1)
    scripts = str(cluster.source / "tests/scripts")
    variables = {"GREETING": "hello", "APPTAINER_IMAGE": str(image), "APPTAINER_BIND": scripts}
    wrapper = str(cluster.source / "slurm/apptainer-python")
    return {"python": wrapper, "env": variables, "setup": [f"export PATH={folder}:$PATH"]}


def submit(
    cluster: Cluster,
    obstacle: Obstacle,
    run: RunDirectory,
    counted: Path,
    *options: object,
    check: bool = True,
) -> str:
    """Submits ``tests/scripts/counts_together.py`` with one short command. Returns what that printed: the job id."""
    command = [cluster.python, "-m", "clusterddp", "submit", cluster.source / SCRIPT, *options]
    shape = ["--nodes", "2", "--gpus", "2", "--run-dir", run.path, "--set", "steps=off"]
    words = [*command, *shape, "--", counted, STEPS, STOP]
    environment = {"PYTHONPATH": str(cluster.source), **obstacle.environment}
    return cluster.run(words, cwd=run.path.parent, env=environment, check=check).stdout.strip()


@pytest.mark.parametrize("obstacle", CASES)
def test_a_run_of_two_nodes_is_preempted_and_completes(
    obstacle: Obstacle, clusters: Clusters, runs_on: Callable[[Cluster], Path]
) -> None:
    """It counts on all nodes, and continues where it was preempted."""
    cluster = site(obstacle, clusters)
    folder = runs_on(cluster)
    training, counted = Training(cluster, folder, RunDirectory(folder / "run")), folder / "counted"
    training.job_id = submit(cluster, obstacle, training.run, counted)
    training.wait(lambda: counted.exists() and counted.read_text() == str(STOP), f"step {STOP}")
    training.preempt()
    assert training.finish() == "completed", story(training.run)
    assert (counted.read_text(), len(training.run.attempts())) == (str(STEPS), 2), story(training.run)
    assert training.run.package_file.exists() == obstacle.image  # the image has no clusterddp
    network = cluster.rank_address if cluster.config.rank_network else cluster.address
    logs = training.run.attempt_logs(1)
    for rank in range(4):
        node = cluster.nodes[rank // 2]
        assert (logs / f"rank-{rank}.out").read_text().split() == [node, network(cluster.nodes[0]), "hello"]


@contextmanager
def without_interface(cluster: Cluster, node: str) -> Iterator[None]:
    """The node has no ib0 meanwhile."""
    cluster.in_network(node, ["ip", "link", "set", "ib0", "down", "name", "ib1"])
    try:
        yield
    finally:
        cluster.in_network(node, ["ip", "link", "set", "ib1", "name", "ib0", "up"])
    address = f"{cluster.rank_address(node)}/25"
    assert address in cluster.in_network(node, ["ip", "addr", "show", "dev", "ib0"]).stdout


@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.product), 1])
def test_a_node_without_the_ranks_interface_ends_a_run_that_has_not_started(
    number: int, clusters: Clusters, runs_on: Callable[[Cluster], Path]
) -> None:
    """The batch step's node cannot tell the others its address, and another one cannot reach that. It is named."""
    cluster = site(EVERYTHING, clusters)
    node, folder = cluster.nodes[number], runs_on(cluster)
    run = RunDirectory(folder / "run")
    with without_interface(cluster, node):
        job = submit(cluster, EVERYTHING, run, folder / "counted")
        assert wait_for_outcome(run) == "failed", story(run)
        cluster.wait_job(job, {"FAILED"})  # and holds no node
    assert f"{node} has no ib0" in (outcome_of(run) or {})["reason"], story(run)
    assert len(run.attempts()) == 1


@pytest.mark.product
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("nodes", [2, 3])
def test_a_run_leaves_a_node_that_has_lost_the_ranks_interface_or_stops(
    nodes: int, number: int, clusters: Clusters, runs_on: Callable[[Cluster], Path]
) -> None:
    """As it leaves one that fails, at once: the batch step's node, or another one. Without a third node, it stops, and
    continues by its user's submission."""
    obstacle = OBSTACLES["a network for ranks"]
    cluster = site(replace(obstacle, cluster={**obstacle.cluster, "nodes": nodes}), clusters)
    node, folder = cluster.nodes[number], runs_on(cluster)
    training, counted = Training(cluster, folder, RunDirectory(folder / "run")), folder / "counted"
    training.job_id = submit(cluster, obstacle, training.run, counted)
    training.wait(lambda: counted.exists() and counted.read_text() == str(STOP), f"step {STOP}")
    with without_interface(cluster, node):
        training.preempt()
        if nodes == 3:
            assert training.finish() == "completed", story(training.run)
            (excluded,) = events_of(training.run, "excluded")
            assert excluded["nodes"] == [node], story(training.run)
            return
        training.wait(lambda: events_of(training.run, "stopped"), "the run to stop")
        (stopped,) = events_of(training.run, "stopped")
        assert f"{node} has no ib0" in stopped["reason"], story(training.run)
        cluster.wait_job(training.job_id, {"COMPLETED"})
    submit(cluster, obstacle, training.run, counted)
    assert training.finish() == "completed", story(training.run)


@pytest.mark.product
@pytest.mark.parametrize("option", [("-p", "low"), ("--set", "mem=1G"), ("--set", "constraint=null")])
def test_a_refused_job_leaves_no_run_behind(
    option: tuple[str, ...], clusters: Clusters, runs_on: Callable[[Cluster], Path]
) -> None:
    cluster = site(EVERYTHING, clusters)
    folder = runs_on(cluster)
    assert submit(cluster, EVERYTHING, RunDirectory(folder / "run"), folder / "counted", *option, check=False) == ""
    assert list(folder.iterdir()) == []
