"""What runs on every node of a job before its ranks start, on a real Slurm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster
from tests.waiting import story, wait_for_outcome, wait_until

SCRIPT = "import os, sys; print(open(sys.argv[1]).read()); print(os.environ['SLURMD_NODENAME'])"


def submit(cluster: Cluster, runs: Path, lines: str, *more: str) -> RunDirectory:
    """A script without torch, after these lines on each node."""
    run = RunDirectory(runs / "run")
    (runs / "train.py").write_text(SCRIPT)
    (runs / "job.yaml").write_text(
        "script: train.py\ndevice: cpu\npartition: low\ncpus_per_task: 1\nsteps: off\ntimeouts: {nodes_s: 3}\n"
        f"args: [{runs}/ready]\nnode_setup: |\n  {lines}\n"
    )
    command = [cluster.python, "-m", "clusterddp.submit", runs / "job.yaml", "--run-dir", run.path, *more]
    cluster.run(command, cwd=cluster.source)
    return run


def failure(cluster: Cluster, run: RunDirectory) -> dict[str, Any]:
    """Of the run's only attempt. It has no job any more."""
    assert wait_for_outcome(run) == "failed", story(run)
    wait_until(lambda: not cluster.run(["squeue", "--noheader", "--me"]).stdout.strip(), "the job to end")
    (failed,) = (event for event in run.events() if event["event"] == "launch_failed")
    assert not (run.attempt_logs(0) / "rank-0.out").exists()
    return failed


def test_every_node_is_set_up_once_before_the_ranks_start_also_a_spare_one(cluster: Cluster, runs: Path) -> None:
    """With two ranks on the first node, and none on the second."""
    lines = f"echo $SLURMD_NODENAME >> {runs}/ready; echo said"
    run = submit(cluster, runs, lines, "--nodes", "1", "--gpus", "2", "--spare-nodes", "1")
    assert wait_for_outcome(run) == "completed", story(run)
    (started,) = (event for event in run.events() if event["event"] == "started")
    nodes = {started["nodes"], *started["spares"]}
    for rank in (0, 1):
        *ready, own = (run.attempt_logs(0) / f"rank-{rank}.out").read_text().split()
        assert sorted(ready) == sorted(nodes) and own == started["nodes"]
    assert {f"{node}: said" for node in nodes} <= set(run.nodes_log(0).read_text().splitlines())


@pytest.mark.product
def test_a_setup_that_fails_on_one_node_ends_the_run_and_names_it(cluster: Cluster, runs: Path) -> None:
    """By the first line that fails, with what it printed."""
    lines = f"echo $SLURMD_NODENAME >> {runs}/ready\n  ls /nowhere/$SLURMD_NODENAME/n1 || [ $SLURMD_NODENAME = n1 ]"
    run = submit(cluster, runs, f"{lines}\n  echo after", "--nodes", "2")
    failed = failure(cluster, run)
    assert failed["suspect"] == "n2" and "n2" in failed["error"] and "/nowhere/n2/n1" in failed["error"]
    assert "n2: after" not in run.nodes_log(0).read_text() and "n1: after" in run.nodes_log(0).read_text()
    assert "/nowhere/n2/n1" in cluster.run([cluster.python, "-m", "clusterddp", "logs", run.path]).stdout


@pytest.mark.product
def test_a_setup_that_hangs_on_one_node_ends_the_run_and_names_it(cluster: Cluster, runs: Path) -> None:
    """Its processes have ended, too."""
    run = submit(cluster, runs, "[ $SLURMD_NODENAME = n1 ] || sleep 4321", "--nodes", "2")
    failed = failure(cluster, run)
    assert failed["suspect"] == "n2" and "timeouts.nodes_s" in failed["error"]
    wait_until(lambda: not any("4321" in one.command() for one in cluster.processes("n2")), "the setup to end")


@pytest.mark.product
@pytest.mark.parametrize("how", ["stop", "preempt"])
def test_a_stop_ends_the_setup_of_the_nodes_at_once(how: str, cluster: Cluster, runs: Path) -> None:
    """No rank starts, and the run continues when it should."""
    lines = f"echo $SLURMD_NODENAME >> {runs}/ready; [ -e {runs}/again ] || sleep 600"
    run = submit(cluster, runs, lines, "--nodes", "2", "--set", "timeouts.nodes_s=600")
    wait_until(lambda: (runs / "ready").exists() and len((runs / "ready").read_text().split()) == 2, "the setup")
    (runs / "again").touch()
    if how == "stop":
        cluster.run([cluster.python, "-m", "clusterddp", "stop", run.path], cwd=cluster.source)
        wait_until(lambda: run.events()[-1]["event"] == "stopped", "the stop")
    else:
        cluster.run(["sbatch", "--partition=high", "--exclusive", "--nodelist=n1", "--wrap=sleep 1"], cwd=runs)
        wait_until(lambda: run.events()[-1]["event"] == "requeued", "the requeue")
    assert not (run.attempt_logs(0) / "rank-0.out").exists()
