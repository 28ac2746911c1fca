"""Who holds a run: on this machine and others, in a copy of its directory, on another cluster, while it is claimed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterddp.cli.submit import submit_here
from clusterddp.errors import RunDirectoryError, SlurmError, SlurmMissing, SlurmUnavailable
from clusterddp.jobdef.job import Job
from clusterddp.process import module_command, process_start
from clusterddp.rundir import claims
from clusterddp.rundir.claims import ProcessClaim, write_claim
from clusterddp.rundir.records import read_json
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.runs import run_status, submission
from clusterddp.runs.recording import check_not_held
from clusterddp.runs.request_client import cancel_run
from clusterddp.slurm.commands import JobInfo
from clusterddp.supervisor import lease, main
from clusterddp.supervisor.controller import LocalController
from tests.fake_slurm import SMALL_CLUSTER, FakeSlurm
from tests.runs_on_disk import jobs_of, outcome_of
from tests.waiting import story, wait_until
from tests.wording import raises

JOB = Job(name="net", module="net", device="cpu")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.create("private")
    run.job_file.write_text(JOB.to_yaml())
    return run


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for a supervisor: it leads a session."""
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        yield process
        process.kill()


def entry_of(process: subprocess.Popen[bytes]) -> ProcessClaim:
    return replace(lease.of_this_process(), pid=process.pid, process_start=process_start(process.pid))


def be_elsewhere(monkeypatch: pytest.MonkeyPatch, namespace: str = "another 4026531836") -> None:
    """As in a container that was started again under another name."""
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    for module in (claims, lease):
        monkeypatch.setattr(module, "process_namespace", lambda: namespace)


def test_a_local_run_that_was_stopped_can_be_continued_under_another_host_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Supervisor and loop let go of it when they end."""
    run, script = RunDirectory(tmp_path / "run"), tmp_path / "train.py"
    script.write_text("print('here', flush=True)\nimport time\ntime.sleep(600)\n")
    words = ("submit", str(script), "--local", "--device", "cpu", "--run-dir", str(run))
    with subprocess.Popen([*module_command("clusterddp"), *words], stderr=subprocess.PIPE, text=True) as loop:
        out = run.attempt_logs(0) / "rank-0.out"
        wait_until(lambda: out.exists() and "here" in out.read_text(), "the script's first line")
        loop.send_signal(signal.SIGINT)
        _, err = loop.communicate(timeout=60)
    assert loop.returncode == 130, err + story(run)
    be_elsewhere(monkeypatch)
    check_not_held(run)
    assert not lease.local_loop_alive(run)
    assert "stopped (interrupted). Continue with" in run_status.state_of(run)[1]


def test_a_run_of_an_unreachable_machine_can_be_taken_over(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it did not end cleanly, that cannot be seen from here: a user who knows says so."""
    for _ in range(2):
        lease.take(run, run.create_attempt(), lease.of_this_process())
    be_elsewhere(monkeypatch)
    with raises(RunDirectoryError):
        check_not_held(run)
    lease.let_go_unreachable(run)
    check_not_held(run)


def test_a_process_is_identified_by_its_machine_under_any_host_name(
    run: RunDirectory, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host was renamed: a running process is still found, and is not taken over."""
    lease.take(run, run.create_attempt(), entry_of(sleeper))
    be_elsewhere(monkeypatch, lease.process_namespace())
    lease.let_go_unreachable(run)
    with raises(RunDirectoryError):
        check_not_held(run)
    sleeper.kill()
    sleeper.wait()
    check_not_held(run)


def test_cancelling_a_copy_leaves_the_original_alone(
    run: RunDirectory, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its entries name the run that they were written for; a run that was only moved is still its own."""
    entry = entry_of(sleeper)
    lease.take(run, run.create_attempt(), entry)
    monkeypatch.setattr(lease, "of_this_process", lambda: entry)
    lease.loop_started(run)
    monkeypatch.undo()
    copy = RunDirectory(run.path.with_name("copy"))
    shutil.copytree(run.path, copy.path)
    assert not lease.local_loop_alive(copy) and lease.local_loop_alive(run)
    assert cancel_run(copy).cancelled
    assert (sleeper.poll(), outcome_of(run), run.cancelled) == (None, None, False)
    moved = RunDirectory(run.path.rename(run.path.with_name("moved")))
    with raises(RunDirectoryError):
        check_not_held(moved)


def test_a_job_of_another_cluster_is_not_taken_for_one_of_this(
    run: RunDirectory, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two clusters on one file system number their jobs alike; the run is neither cancelled nor continued here."""
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "alpha")
    lease.take(run, run.create_attempt(), lease.of_job("41"))
    assert read_json(run.holder_file(0))["cluster"] == "alpha"  # type: ignore[index]
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "beta")
    words = "held by job 41 of cluster alpha, which cannot be reached from here"
    assert str(lease.held_by_other(run, lease.of_job("41"))) == words
    with raises(RunDirectoryError):
        cancel_run(run)
    assert fake_slurm.asked == []
    assert (run.cancelled, outcome_of(run)) == (False, None)


def test_a_cancel_while_an_attempt_is_claimed_ends_it(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No entry says yet who holds the run: the supervisor looks once more when it has written its own."""
    claim = RunDirectory.create_attempt

    def claimed_and_cancelled(self: RunDirectory) -> int:
        number = claim(self)
        assert cancel_run(run).cancelled
        return number

    monkeypatch.setattr(RunDirectory, "create_attempt", claimed_and_cancelled)
    no_ranks = lambda *_: pytest.fail("the ranks are started")  # noqa: E731
    assert main.supervise_one(run, JOB, no_ranks, LocalController(run)) == 1
    assert lease.holders(run) == []


def test_a_run_with_a_debugged_rank_can_be_cancelled(run: RunDirectory) -> None:
    """Its supervisor leads no session, since the rank keeps the terminal: the ranks alone are signalled."""
    with subprocess.Popen(["sh", "-c", "sleep 600 & wait $!"]) as process:
        wait_until(lambda: Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(), "the shell's child")
        assert os.getpgid(process.pid) != process.pid
        lease.take(run, run.create_attempt(), entry_of(process))
        waiting = subprocess.Popen([*module_command("clusterddp"), "cancel", str(run)], stdout=subprocess.PIPE)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
        assert b"cancelled. The run will not start again" in waiting.communicate(timeout=60)[0]
    assert (outcome_of(run) or {})["state"] == "cancelled"


def test_one_process_at_a_time_submits_a_run_and_the_claim_of_a_dead_one_is_void(
    run: RunDirectory, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed one leaves its claim, and one of another machine counts for as long as a submission can take."""
    with lease.submitting(run) as other:
        assert other is None
        with lease.submitting(run) as mine:
            assert mine == f"{run} is being submitted by process {os.getpid()} on {socket.gethostname()}"
    files = lambda: [path.name for path in run.private.iterdir()]  # noqa: E731
    assert files() == []
    for write in (lambda path: write_claim(path, run, entry_of(sleeper)), lambda path: path.write_text("")):
        write(run.private / "submitting-3.json")
        with lease.submitting(run) as other:
            assert other is not None
        assert files() == ["submitting-3.json"]
    write_claim(run.private / "submitting-3.json", run, entry_of(sleeper))
    with monkeypatch.context() as patched:
        be_elsewhere(patched)
        with lease.submitting(run) as other:
            assert other is not None
        os.utime(run.private / "submitting-3.json", (0, time.time() - lease.SUBMISSION_S - 60))
        with lease.submitting(run) as other:
            assert other is None and files() == ["submitting-4.json"]
    write_claim(run.private / "submitting-3.json", run, entry_of(sleeper))
    sleeper.kill()
    sleeper.wait()
    with lease.submitting(run) as other:
        assert other is None and files() == ["submitting-4.json"]


def test_a_claim_that_another_process_made_under_an_older_number_is_seen(
    run: RunDirectory, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While this process was about to make its own, the dead claim was replaced, removed, and its number used again."""
    path, create = run.private / "submitting-0.json", lease.create_claim
    write_claim(path, run, replace(lease.of_this_process(), process_start="1"))

    def late(*claim: Any) -> bool:
        write_claim(path, run, entry_of(sleeper))
        return create(*claim)

    monkeypatch.setattr(lease, "create_claim", late)
    with lease.submitting(run) as other:
        assert other is not None and f"process {sleeper.pid} on" in other
    assert [file.name for file in run.private.iterdir()] == [path.name]


RACE = """
import sys, threading, time
from pathlib import Path
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.supervisor import lease
run = RunDirectory(sys.argv[1])
sys.stdin.readline()
with lease.submitting(run) as other:
    if other is None:
        print("won", flush=True)
        sys.stdin.readline()
    else:
        print(other, flush=True)
"""


def test_of_many_processes_that_claim_a_submission_at_once_one_wins(run: RunDirectory) -> None:
    """Also after the claim of a dead process, which all of them find."""
    write_claim(run.private / "submitting-0.json", run, replace(lease.of_this_process(), process_start="1"))
    command = [sys.executable, "-c", RACE, str(run)]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("start\n")
        process.stdin.flush()
    said = [process.stdout.readline().strip() for process in processes if process.stdout is not None]
    for process in processes:
        process.communicate("end\n", timeout=60)
    winner = processes[said.index("won")]
    assert said.count("won") == 1
    assert sum(f"is being submitted by process {winner.pid} on" in words for words in said) == len(said) - 1


@pytest.mark.parametrize(("error", "stays"), [(SlurmError, False), (SlurmUnavailable, True), (SlurmMissing, False)])
def test_a_new_run_directory_stays_if_slurm_may_have_accepted_its_job(
    tmp_path: Path, fake_slurm: FakeSlurm, error: type[SlurmError], stays: bool
) -> None:
    """The job would find nothing in its place."""
    run = RunDirectory(tmp_path / "new")
    fake_slurm |= {**SMALL_CLUSTER, "sbatch": error("Zero Bytes were transmitted or received"), "squeue": ""}
    with pytest.raises(error):
        submission.submit_to_slurm(JOB, str(run))
    assert run.exists() is stays


def test_two_submissions_of_one_run_directory_at_the_same_moment_are_one(
    tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one is refused with the reason at once, before the folder holds a run and while sbatch runs."""
    run = RunDirectory(tmp_path / "new")
    refused: list[str] = []

    def second() -> None:
        with pytest.raises(RunDirectoryError) as error:
            submission.check(JOB, str(run))
            submission.submit_to_slurm(JOB, str(run))
        refused.append(str(error.value))

    def sbatch(*_: object) -> str:
        second()
        return "41"

    fake_slurm |= {**SMALL_CLUSTER, "sbatch": sbatch}
    fake_slurm["scontrol show job"] = JobInfo("41", "PENDING", "", "", 0, None, None)
    monkeypatch.setattr("clusterddp.runs.recording.write_code", lambda *_: None if refused else second())
    submission.submit_to_slurm(JOB, str(run))
    second()
    assert "is being submitted by process" in refused[0] and "is being submitted by process" in refused[1]
    assert "held by job 41 (PENDING)" in refused[2] and "end the job with `scancel 41`" in refused[2]
    assert jobs_of(lease.holders(run))[0] == "41"


def test_a_process_whose_start_is_not_recorded_does_not_count_as_running(sleeper: subprocess.Popen[bytes]) -> None:
    """Neither one that has ended, nor one that has its number now."""
    for pid in (sleeper.pid, 2**22 + 1):
        assert not claims.process_alive(ProcessClaim("", pid))
    assert claims.process_alive(entry_of(sleeper))


def test_a_changed_submission_in_an_allocation_leaves_a_run_that_another_process_trains_as_it_is(
    run: RunDirectory, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    lease.take(run, run.create_attempt(), entry_of(sleeper))
    before = run.job_file.read_text()
    with raises(RunDirectoryError):
        submit_here(Job(name="net", module="net", device="cpu", args=("--lr", "1")), str(run), changed=True)
    assert run.job_file.read_text() == before
