"""Several GPUs per rank: what each rank is shown on a real Slurm."""

from __future__ import annotations

from pathlib import Path

from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster
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
