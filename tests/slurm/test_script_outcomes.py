"""Scripts that expect a signal of their own at a stop, on a real Slurm with proctrack/cgroup."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests.cluster import Cluster
from tests.slurm.test_main_job import submit
from tests.waiting import story, wait_for_outcome, wait_until

STEPS = 150


def output(run: RunDirectory, attempt: int, rank: int) -> str:
    log = run.attempt_logs(attempt) / f"rank-{rank}.out"
    return log.read_text() if log.exists() else ""


def start(cluster: Cluster, runs: Path, *options: str, pause_s: float = 0.05) -> tuple[RunDirectory, str]:
    """Two ranks on two nodes; once both have made a step."""
    run = RunDirectory(runs / "run")
    shape = "--nodes 2 --gpus 1 --device cpu --partition low --set stop.signal=USR1".split()
    script = ["--", "SIGUSR1", str(runs / "saves"), str(STEPS), str(pause_s)]
    job_id = submit(cluster, run, "tests/scripts/saves_on_a_signal.py", *shape, *options, *script).stdout.strip()
    wait_until(lambda: all("step 2" in output(run, 0, rank) for rank in (0, 1)), f"both ranks\n{story(run)}")
    return run, job_id


def check_continued(run: RunDirectory) -> None:
    """Every rank was told by its signal alone, saved, and continued from there in the second attempt of two."""
    assert wait_for_outcome(run) == "completed", story(run)
    assert run.attempts() == [0, 1], story(run)
    for rank in (0, 1):
        saved = output(run, 0, rank).splitlines()[-1]
        assert saved.startswith("saved step") and saved.endswith("on ['SIGUSR1']"), story(run)
        assert "TERM came" not in output(run, 0, rank)
        assert output(run, 1, rank).startswith(f"starts at step {saved.split()[2]}\n")


def test_slurms_term_becomes_the_signal_that_the_script_expects(cluster: Cluster, runs: Path) -> None:
    """Slurm sends TERM to both tasks; rank 1 saves for longer than rank 0."""
    cluster.set_grace(20)
    run, _ = start(cluster, runs)
    cluster.preempt(seconds=1)
    check_continued(run)


def test_a_script_that_requeues_its_job_itself_is_requeued_once(cluster: Cluster, runs: Path) -> None:
    """As lingua, whose handler saves, calls `scontrol requeue` and exits with 0."""
    cluster.set_grace(20)
    run, job_id = start(cluster, runs, "--set", "env.REQUEUES_ITSELF=1")
    cluster.preempt(seconds=1)
    check_continued(run)
    assert [event["event"] for event in run.events() if event["event"] in ("requeued", "resubmitted")] == [], story(run)
    assert cluster.job(job_id)["Restarts"] == "1", story(run)


@pytest.mark.product
def test_the_time_limit_is_told_by_the_signal_that_the_script_expects(cluster: Cluster, runs: Path) -> None:
    """By the supervisor, or by Slurm's own warning, which is another signal."""
    run, job_id = start(cluster, runs, "--time", "30", "--set", "timeouts.notice_s=45", pause_s=0.8)
    cluster.root(["scontrol", "update", f"JobId={job_id}", "TimeLimit=1"])
    wait_until(lambda: 1 in run.attempts(), f"the second attempt\n{story(run)}")
    cluster.root(["scontrol", "update", f"JobId={job_id}", "TimeLimit=30"])
    check_continued(run)
    (event,) = [event for event in run.events() if event["event"] == "requeued"]
    assert event["cause"] == "stopped before the time limit"
