"""Scripts without a line of clusterddp that save for themselves, on a real Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster
from tests.slurm.test_main_job import submit
from tests.waiting import story, wait_for_outcome, wait_until


@pytest.mark.product
def test_a_preemption_in_the_save_of_the_only_checkpoint_loses_nothing(cluster: Cluster, runs: Path) -> None:
    """Slurm's TERM ends rank 1 at once. Rank 0 completes its save, and is not killed before."""
    cluster.set_grace(20)
    run, out = RunDirectory(runs / "run"), runs / "out"
    shape = "--nodes 1 --gpus 2 --device cpu --partition low".split()
    submit(cluster, run, "tests/scripts/like_nanogpt.py", *shape, "--", str(out), "40", "25")
    log = run.attempt_logs(0) / "rank-0.out"
    wait_until(lambda: log.exists() and "a slow save begins" in log.read_text(), f"the slow save\n{story(run)}")
    cluster.preempt(seconds=1)
    assert wait_for_outcome(run) == "completed", story(run)
    assert run.attempts() == [0, 1], story(run)
    assert f"Resuming training from {out} at iter 26" in (run.attempt_logs(1) / "rank-0.out").read_text(), story(run)
    assert [path.name for path in out.iterdir()] == ["ckpt.pt"]
