"""A script with its own process group and two lines of clusterddp, preempted on a real Slurm."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster
from tests.waiting import story, wait_for_outcome, wait_until


@pytest.mark.product  # ranks/test_two_lines.py has the same with --local
def test_a_sharded_script_with_two_lines_loses_no_step_to_a_preemption(cluster: Cluster, runs: Path) -> None:
    run = RunDirectory(runs / "run")
    for attempt in (1, 2):
        (runs / f"go-{attempt}").touch()
    shape = ["--nodes", "2", "--gpus", "2", "--device", "cpu", "--partition", "low", "--run-dir", run.path]
    submit = [cluster.python, "-m", "clusterddp.submit", cluster.source / "tests" / "scripts" / "two_lines.py"]
    cluster.run([*submit, *shape, "--", "saved", "12"], cwd=runs)
    logs = [run.attempt_logs(0) / f"rank-{rank}.out" for rank in range(4)]
    wait_until(lambda: all(log.exists() and "at step 5" in log.read_text() for log in logs), "step 5", timeout=60)
    cluster.preempt(seconds=1)
    wait_until(lambda: any(event["event"] == "signal" for event in run.events()), "the signal", timeout=60)
    (runs / "go-0").touch()
    assert wait_for_outcome(run) == "completed", story(run)
    (stop,) = {re.findall(r"stops after step (\d+)", log.read_text())[0] for log in logs}
    again = [(run.attempt_logs(1) / f"rank-{rank}.out").read_text() for rank in range(4)]
    assert all(f"starts at step {stop}\n" in text for text in again), story(run)
    told = [
        (event["event"], event.get("cause"))
        for event in run.events()
        if event["event"] in ("saved", "requeued", "not_read")
    ]
    assert told == [("saved", None), ("requeued", "preempted")], story(run)
