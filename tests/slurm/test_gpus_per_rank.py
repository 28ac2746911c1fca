"""The default request of a job with GPUs, and what its ranks are shown, on a real Slurm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster, ClusterConfig
from tests.conftest import Clusters
from tests.ranks.test_gpus_per_rank import SCRIPT, SHARED, seen


def test_on_slurm_a_rank_per_two_gpus_sees_all_of_its_nodes(cluster: Cluster, runs: Path) -> None:
    """Two nodes with two GPUs, one rank each; beside it the same without, where two ranks share the node's two."""
    ranks = {}
    for name, options in {"two": SHARED, "one": []}.items():
        run = ranks[name] = RunDirectory(runs / name)
        command = [cluster.python, "-m", "clusterddp.submit", SCRIPT, "--run-dir", run.path, *options]
        shape = ["--nodes", "1" if name == "one" else "2", "--gpus", "2", "--partition", "off"]
        said = cluster.run([*command, *shape], cwd=cluster.source).stderr
        assert ("2 nodes x 2 GPUs (2 per rank) per node = 2 ranks" in said) == (name == "two")
    assert seen(ranks["two"]) == ["0 0 1 0,1", "1 0 1 0,1"]
    assert seen(ranks["one"]) == ["0 0 2 0,1", "1 1 2 0,1"]


def test_a_job_does_not_request_what_its_nodes_reserve(clusters: Clusters, runs_on: Callable[[Cluster], Path]) -> None:
    """sbatch would refuse a request for all CPUs, or all memory, of nodes with CoreSpecCount and MemSpecLimit."""
    release = Clusters.standard.release
    asked = ClusterConfig(
        nodes=1, slurmdbd=False, memory_limits=True, threads=2, reserved_cores=1, reserved_mib=1000, release=release
    )
    cluster = clusters.get(asked)
    run = RunDirectory(runs_on(cluster) / "run")
    command = [cluster.python, "-m", "clusterddp.submit", SCRIPT, "--run-dir", run.path, "--gpus", "2"]
    done = cluster.run([*command, "--partition", "off"], cwd=cluster.source)
    assert "requesting 3 CPUs per rank and 999000M of memory per node" in done.stderr
    cluster.run(["scancel", done.stdout.strip()])
    too_much = ["sbatch", "--test-only", "--partition=off", "--wrap=true"]
    for option in ("--cpus-per-task=7", "--mem=999001M"):
        assert "not available" in cluster.run([*too_much, option], check=False).stderr
