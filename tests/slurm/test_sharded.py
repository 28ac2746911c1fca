"""A model that fully_shard has sharded over two nodes of a real Slurm: killed, preempted, on fewer ranks."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp
from tests.cluster import Cluster
from tests.ranks.test_sharded_resume import SHARDED, losses, samples, state, train
from tests.trainings import Training, events_of
from tests.waiting import story, wait_for_step

STEPS = 30


def submit(cluster: Cluster, folder: Path, *script: object, options: str = "--nodes 2") -> Training:
    """A run of two ranks on two nodes, which saves every fifth step."""
    run = RunDirectory(folder / "run")
    command = [cluster.python, "-m", "clusterddp.submit", "--run-dir", run.path, SHARDED, *options.split()]
    shape = "--gpus 1 --device cpu --partition low --set timeouts.notice_s=15".split()
    words = [*shape, "--set", "checkpoint.every=5 steps", "--", run.path, STEPS, *script]
    return Training(cluster, folder, run, cluster.run([*command, *map(str, words)], cwd=cluster.source).stdout.strip())


def whole(folder: Path) -> ddp.Ranks:
    """The same, uninterrupted, on this machine."""
    return train(folder / "whole", STEPS)


def check_same(training: Training, folder: Path, attempts: int) -> None:
    """The run has ended with the same bits as one that nothing interrupts."""
    run = training.run
    assert training.finish() == "completed", story(run)
    assert run.attempts() == [*range(attempts)], story(run)
    assert [event["inexact"] for event in events_of(run, "resumed")] == [[]] * (attempts - 1)
    assert state(whole(folder), "end") in (run.attempt_logs(attempts - 1) / "rank-0.out").read_text()
    assert losses(run.path) == losses(folder / "whole")
    assert samples(run.path) == samples(folder / "whole")


@pytest.mark.product  # ranks/test_sharded_resume.py has the bits
def test_a_run_whose_rank_is_killed_and_which_is_then_preempted_ends_with_the_same_bits(
    cluster: Cluster, runs: Path, tmp_path: Path
) -> None:
    """The kill repeats no more steps than one interval, the preemption none."""
    training = submit(cluster, runs, "--pause", 0.2)
    wait_for_step(training.run, 7)
    training.ranks_on("n2")[0].kill(signal.SIGKILL)
    training.wait_for_a_step_of(1)
    training.preempt()
    check_same(training, tmp_path, attempts=3)
    killed, preempted = events_of(training.run, "resumed")
    assert killed["step"] >= 5 and killed["redone"] <= 5
    assert preempted["redone"] == 0, story(training.run)


@pytest.mark.product
def test_a_run_continues_on_the_nodes_that_are_there(cluster: Cluster, runs: Path, tmp_path: Path) -> None:
    """On three nodes, and after a preemption on two, because the others are drained: the same samples in each step."""
    options = "--nodes 2-3 --set global_batch=12"
    training = submit(cluster, runs, "--pause", 0.2, "--micro", options=options)
    wait_for_step(training.run, 7)
    cluster.root(["scontrol", "update", "nodename=n3", "state=drain", "reason=test"])
    cluster.preempt(seconds=0.1, nodes=2)
    assert training.finish() == "completed", story(training.run)
    assert [event["ranks"] for event in events_of(training.run, "started")] == [3, 2]
    (resumed,) = events_of(training.run, "resumed")
    assert (resumed["redone"], resumed["inexact"]) == (0, ["2 ranks instead of 3"])
    whole(tmp_path)
    assert samples(training.run.path) == samples(tmp_path / "whole")
