"""``clusterddp.launch()`` on a real Slurm, with a real preemption."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster
from tests.waiting import story, wait_until


@pytest.mark.product  # ranks/test_launch_api.py has the same, test_submitit_launchers.py a callable on Slurm
def test_a_preempted_submitit_callable_continues_from_its_checkpoint(cluster: Cluster, runs: Path) -> None:
    """Launched, and waited for, by two processes; the second one lifts the hold after the requeue."""
    run, marks = RunDirectory(runs / "run"), runs / "marks"
    marks.mkdir()
    os.chown(marks, cluster.uid, -1)
    script = [cluster.python, "tests/scripts/launching.py"]
    cluster.run([*script, "launch", run.path, marks], cwd=cluster.source)
    wait_until(lambda: len(list(marks.iterdir())) == 2, "both ranks", timeout=60)
    cluster.preempt(seconds=0.1)
    done = cluster.run([*script, "result", run.path, marks], cwd=cluster.source, timeout=120)
    assert done.stdout.strip() == str([("trained again", 2, ["0"])] * 2), f"{done.stderr}\n{story(run)}"
    assert [event["event"] for event in run.events()].count("requeued") == 1
