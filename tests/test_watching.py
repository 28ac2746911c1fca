"""What a watcher does for a run, and what it never does; on a cluster it is tested in test_preemption.py."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from clusterddp.job import Job
from clusterddp.launch import holder, watching
from clusterddp.launch.slurm import JobInfo
from clusterddp.launch.watching import Hold, Watcher
from clusterddp.rundir import RunDirectory, append_line, write_json

JOB = Job(name="x", module="x")


def info(state: str, reason: str = "None", restarts: int = 0, preempted: bool = False) -> JobInfo:
    return JobInfo("41", state, reason, "n1", restarts, True, 1.0 if preempted else None, None)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run whose job 41 has made attempt 0."""
    run = RunDirectory(tmp_path / "run")
    run.create()
    number = run.create_attempt()
    holder.take(run, number, holder.of_job("41"))
    append_line(run.events_file, {"event": "started", "attempt": 0, "time": 1.0, "job": "41", "restarts": 0})
    return run


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The submissions that were made."""
    made: list[str] = []

    def submit(script: Path, *options: str) -> str:
        made.append(" ".join([script.name, *options]))
        return "42"

    monkeypatch.setattr("clusterddp.launch.slurm.submit", submit)
    return made


def look(run: RunDirectory, job: JobInfo | None, monkeypatch: pytest.MonkeyPatch) -> Watcher:
    monkeypatch.setattr("clusterddp.launch.slurm.show_job", lambda _: job)
    watcher = Watcher(run, JOB)
    watcher.look()
    return watcher


@pytest.mark.parametrize(
    ("job", "request_of", "resubmitted"),
    [
        (info("NODE_FAIL"), None, True),
        (info("TIMEOUT"), None, True),
        (info("FAILED", restarts=1), None, True),
        (info("FAILED"), None, False),
        (info("COMPLETED", preempted=True), "41", True),
        (info("COMPLETED", preempted=True), "40", False),
        (info("COMPLETED"), "41", False),
        (info("CANCELLED", preempted=True), "41", False),
        (None, "41", False),
    ],
)
def test_a_run_whose_job_ended_is_resubmitted_unless_somebody_wanted_its_end(
    run: RunDirectory,
    submitted: list[str],
    monkeypatch: pytest.MonkeyPatch,
    job: JobInfo | None,
    request_of: str | None,
    resubmitted: bool,
) -> None:
    """A lost node, a start that failed, a supervisor that could not ask: yes. scancel, a crash, the unknown: never."""
    if request_of is not None:
        write_json(run.request_file, {"job": request_of})
    watcher = look(run, job, monkeypatch)
    assert (submitted == ["job.sbatch"]) is resubmitted
    assert watcher.result == (None if resubmitted else 1)
    if resubmitted:
        assert holder.holders(run)[0]["job"] == "42"


@pytest.mark.parametrize(("usable", "options"), [(["n1", "n2"], " --exclude=n2"), (["n2"], "")])
def test_a_node_that_failed_the_run_twice_stays_left_out(
    run: RunDirectory, submitted: list[str], monkeypatch: pytest.MonkeyPatch, usable: list[str], options: str
) -> None:
    """Where another one works."""
    append_line(run.events_file, {"event": "excluded", "attempt": 0, "time": time.time(), "nodes": ["n2"]})
    monkeypatch.setattr("clusterddp.launch.slurm.usable_nodes", lambda _: usable)
    look(run, info("NODE_FAIL"), monkeypatch)
    assert submitted == [f"job.sbatch{options}"]


def test_an_attempt_that_is_just_being_claimed_leaves_no_gap_in_who_holds_the_run(run: RunDirectory) -> None:
    """Its folder is there, its entry not yet: the one before still holds the run."""
    run.create_attempt()
    assert holder.holders(run) == [holder.of_job("41")]


def test_a_cancelled_run_is_never_resubmitted(
    run: RunDirectory, submitted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever became of its job."""
    run.mark_cancelled()
    look(run, info("NODE_FAIL"), monkeypatch)
    assert submitted == []


def test_a_hold_is_lifted_only_after_slurmds_memory_of_the_old_start_has_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lifted within the second of the requeue, the job would be FAILED for good: credential revoked."""
    lifted: list[str] = []
    clock = [100.0]
    monkeypatch.setattr("clusterddp.launch.slurm.lift_hold", lifted.append)
    monkeypatch.setattr(watching.time, "monotonic", lambda: clock[0])
    hold, held = Hold(), info("PENDING", "BeginTime", restarts=1)
    assert not hold.lift_when_safe(held)
    clock[0] += watching.SETTLE_S - 0.1
    assert not hold.lift_when_safe(held)
    clock[0] += 0.2
    assert hold.lift_when_safe(held)
    assert lifted == ["41"]
    assert not hold.lift_when_safe(info("PENDING", "BeginTime", restarts=2)), "the next requeue, unseen in between"
    assert not hold.lift_when_safe(info("PENDING", "Resources", restarts=1))
    assert not hold.lift_when_safe(info("PENDING", "BeginTime", restarts=0)), "the user's own --begin"
