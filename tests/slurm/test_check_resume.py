"""``submit --local --check-resume`` in a step of an allocation, which is how it gets a node's GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster import Cluster


@pytest.mark.product
def test_the_check_runs_on_a_node_of_an_allocation(cluster: Cluster, runs: Path) -> None:
    check = [cluster.python, "-m", "clusterddp", "submit", "--local", "--device", "cpu", "--check-resume", "6"]
    words = [
        "srun",
        "--partition=low",
        "--nodes=1",
        "--ntasks=1",
        *check,
        "tests/scripts/train.py",
        "--",
        "--steps",
        40,
    ]
    done = cluster.run(words, cwd=cluster.source, env={"CLUSTERDDP_RUNS": str(runs)}, timeout=180, check=False)
    assert (done.returncode, "no difference in 6 steps" in done.stderr) == (0, True), done.stderr
    assert list(runs.iterdir()) == []
