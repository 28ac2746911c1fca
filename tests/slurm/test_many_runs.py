"""Commands for many runs, on a real Slurm: waiting for them and cancelling them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster
from tests.waiting import story, wait_until


@pytest.mark.product  # test_transcript.py has the commands for one run, unit/test_waiting.py several
def test_many_runs_are_waited_for_and_cancelled(cluster: Cluster, runs: Path) -> None:
    """One completes; one runs and one is pending until both are cancelled by one command, which frees the nodes."""

    def clusterddp(*words: str | Path) -> subprocess.CompletedProcess[str]:
        return cluster.run([cluster.python, "-m", "clusterddp", *words], cwd=runs, check=False)

    (runs / "quick.py").write_text("print('done')\n")
    (runs / "long.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    shape = "--nodes 3 --gpus 1 --device cpu --partition low".split()
    for name in ("quick", "long", "late"):
        script = "quick.py" if name == "quick" else "long.py"
        done = clusterddp("submit", script, "--run-dir", f"all/{name}", *shape)
        assert done.returncode == 0, done.stderr
    first = clusterddp("wait", "--any", "all", "--timeout", "60s")
    assert (first.returncode, first.stdout) == (0, ""), first.stderr
    assert first.stderr == f"{runs}/all/quick: completed: all ranks finished\n"
    running = RunDirectory(runs / "all" / "long")
    wait_until(lambda: "begun" in clusterddp("logs", running.path).stdout, story(running), 60)
    up = clusterddp("wait", "all", "--timeout", "2s")
    assert (up.returncode, up.stderr.splitlines()[-1]) == (124, "timed out: 2 of 3 runs did not end (late, long)")
    asked = clusterddp("cancel", "all")
    assert (asked.returncode, "whether to cancel 2 runs" in asked.stderr) == (2, True), asked.stderr
    cancelled = clusterddp("cancel", "all", "--yes")
    assert cancelled.returncode == 0, cancelled.stderr + story(running)
    assert cluster.root(["squeue", "--noheader", "--states=RUNNING,PENDING"]).stdout == ""
    over = clusterddp("wait", "all")
    assert (over.returncode, over.stderr.count(": cancelled")) == (11, 2), over.stderr
