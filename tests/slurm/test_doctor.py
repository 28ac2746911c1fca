"""``clusterddp doctor`` on a real cluster, and ``preflight: true`` with a node that fails."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from clusterddp.hostlist import expand
from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster
from tests.trainings import events_of
from tests.waiting import story

DOCTOR = ("-m", "clusterddp", "doctor")


def test_a_cluster_and_its_nodes_are_checked_and_nothing_is_left_behind(cluster: Cluster, runs: Path) -> None:
    """The rows of the login node; a job that waits is interrupted; then a row for each of two nodes."""
    done = cluster.run([cluster.python, *DOCTOR, "--json"], cwd=runs)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert {"slurm", "clock", "accounts", "runs folder", "torch", "commands"} <= checks.keys()
    low = checks["partition low (default)"]["values"]
    assert (low["nodes"], low["gpus"], low["grace_s"], low["hold_s"]) == (3, 6, 20, 7)
    assert all(check["state"] != "failed" for check in checks.values())

    every = ["sbatch", "--parsable", "-p", "low", "-N", "3", "--exclusive", "-o", "/dev/null", "--wrap=sleep 600"]
    blocker = cluster.run(every).stdout.strip()
    cluster.wait_job(blocker, ["RUNNING"])
    on_nodes = [cluster.python, *DOCTOR, "--nodes", "2", "--device", "cpu"]
    waiting = cluster.popen(on_nodes, cwd=runs, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert waiting.stderr is not None
    assert any("is waiting: " in line for line in iter(waiting.stderr.readline, ""))
    waiting.send_signal(signal.SIGINT)
    assert waiting.wait(timeout=30) == 130
    jobs = cluster.root(["squeue", "--noheader", "--format=%A %T"]).stdout.splitlines()
    assert [job.split()[0] for job in jobs if job.split()[1] != "CANCELLED"] == [blocker]
    cluster.run(["scancel", blocker])

    done = cluster.run([*on_nodes, "--json"], cwd=runs, timeout=90)
    nodes = json.loads(done.stdout)["nodes"]
    assert [node["state"] for node in nodes] == ["ok", "ok"], done.stdout
    for node in nodes:
        found = {check["name"]: check["values"] for check in node["checks"] if "values" in check}
        assert found["network"]["address"] == cluster.address(node["name"])
        assert found["all-reduce"]["ranks"] == 2 and found["all-reduce"]["bus_bytes_per_s"] > 0
        assert abs(found["clock"]["ahead_s"]) < 1
    assert list(runs.iterdir()) == []


#: On one node a GPU computes nonsense.
BREAKS = (
    "import os; from clusterddp.checks import check, compute; os.environ['SLURMD_NODENAME'] != 'n2' or "
    "setattr(compute, 'multiply', lambda device: check.failed('compute', '3 of 9 elements are wrong', ''))"
)


@pytest.mark.product
def test_a_run_leaves_a_node_that_fails_its_preflight(cluster: Cluster, runs: Path) -> None:
    """The node has a second chance; then it is excluded, and the run passes on two others."""
    run = RunDirectory(runs / "run")
    shape = "--nodes 2 --gpus 1 --device cpu --partition low --set preflight=true --wait".split()
    command = [cluster.python, "-m", "clusterddp.submit", "tests/scripts/changed.py", "--run-dir", run, *shape]
    arguments = ["--", BREAKS, "tests/scripts/small.py", "-", "3"]
    cluster.run([*command, *arguments], cwd=cluster.source, timeout=150)
    nodes = [expand(event["nodes"]) for event in events_of(run, "started")]
    assert nodes[0] == nodes[1] == ["n1", "n2"] and nodes[2] == ["n1", "n3"], story(run)
    failures = events_of(run, "rank_failed")
    assert [event["suspect"] for event in failures] == ["n2", "n2"]
    assert all("node n2 failed the check 'compute' on cpu" in event["error"] for event in failures)
    assert [event["attempt"] for event in events_of(run, "preflight")] == [2]
