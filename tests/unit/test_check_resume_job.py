"""``submit --check-resume`` on a cluster, without one: the wait for its job, and the job's batch step."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from clusterddp.cli.recording import recorded
from clusterddp.cli.resume_check import batch_step, slurm_job, trials
from clusterddp.cli.resume_check.result_file import RESULT_FILE, read_result, write_result, write_steps
from clusterddp.cli.resume_check.slurm_job import Watch, conclude, script
from clusterddp.cli.resume_check.trials import AllocatedTrials, Interrupted, short_of_time, stopped_by_others
from clusterddp.errors import CheckUnfinished, ClusterddpError, NotRepeatable, ResumeDiffers, SlurmError
from clusterddp.errors import SlurmUnavailable as Unavailable
from clusterddp.jobdef import code_snapshot
from clusterddp.jobdef.job import Job
from clusterddp.rundir.files import append_line, write_json
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.step_records import WHY
from clusterddp.slurm.cause import Cause
from clusterddp.slurm.queue import QueuedJob

# --- the wait


@pytest.fixture
def owner(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "owner")
    run.create()
    return run


@pytest.fixture
def said_of_job(monkeypatch: pytest.MonkeyPatch) -> list[QueuedJob | Exception | None]:
    """What Slurm says of the job; the last answer is repeated."""
    answers: list[QueuedJob | Exception | None] = []

    def ask(job_id: str) -> QueuedJob | None:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(slurm_job.awaited_job, "find", ask)
    for seconds in ("LOOK_S", "ASK_S", "LATE_S"):
        monkeypatch.setattr(slurm_job, seconds, 0.0)
    return answers


def queued(state: str, reason: str = "None") -> QueuedJob:
    return QueuedJob("7", state, "n[1-2]" if state == "RUNNING" else "", None, "5:00", "gpu", reason)


def test_the_wait_shows_why_the_job_waits_and_what_it_prints(
    owner: RunDirectory,
    said_of_job: list[QueuedJob | Exception | None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each line once. A controller that does not answer ends nothing."""
    steps = [
        lambda: None,
        lambda: None,
        lambda: None,
        lambda: (owner.logs / "job-7.log").write_text("resume check: 12 steps without a resume\n"),
        lambda: write_result(owner.path, 0, "no difference"),
    ]
    monkeypatch.setattr("clusterddp.cli.resume_check.slurm_job.time.sleep", lambda _: steps.pop(0)())
    said_of_job += [queued("PENDING", "Priority"), queued("PENDING", "Priority"), Unavailable("no answer")]
    said_of_job += [queued("RUNNING")]
    assert Watch(owner, "7").until_result() == (0, "no difference")
    assert capsys.readouterr().err.splitlines() == [
        "resume check: job 7 waits: jobs with a higher priority are first",
        "resume check: job 7 retrying: no answer",
        "resume check: job 7 runs on n[1-2]",
        "resume check: 12 steps without a resume",
    ]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("PREEMPTED", "job 7 was preempted; start it again, if there is one in a partition or QOS"),
        ("TIMEOUT", "job 7 reached its time limit; start it again with a longer --time, or with fewer steps"),
        ("CANCELLED", "job 7 was cancelled; start it again"),
        ("NODE_FAIL", "job 7 lost a node; start it again"),
        ("OUT_OF_MEMORY", "job 7 ran out of memory; request more with --mem; start it again"),
    ],
)
def test_a_job_that_is_ended_from_outside_is_a_check_that_did_not_finish(
    owner: RunDirectory, said_of_job: list[QueuedJob | Exception | None], state: str, words: str
) -> None:
    said_of_job.append(queued(state))
    with pytest.raises(CheckUnfinished) as raised:
        Watch(owner, "7").until_result()
    assert str(raised.value).startswith(f"the check did not finish, and nothing was found out: {words}")
    assert raised.value.exit_code == 75


@pytest.mark.parametrize("job", [queued("FAILED"), None])
def test_a_job_without_a_result_is_an_error_that_names_what_nodes_must_see(
    owner: RunDirectory, said_of_job: list[QueuedJob | Exception | None], job: QueuedJob | None
) -> None:
    said_of_job.append(job)
    state = "FAILED" if job else "unknown to Slurm"
    with pytest.raises(
        SlurmError, match=rf"job 7 ended \({state}\) on no node without a result in {owner.path.parent}"
    ):
        Watch(owner, "7").until_result()


def test_a_result_that_comes_after_the_jobs_end_counts(
    owner: RunDirectory, said_of_job: list[QueuedJob | Exception | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS."""
    monkeypatch.setattr(slurm_job, "LATE_S", 3600.0)
    monkeypatch.setattr(
        "clusterddp.cli.resume_check.slurm_job.time.sleep",
        lambda _: write_result(owner.path, 3, "it differs"),
    )
    said_of_job.append(queued("FAILED"))
    assert Watch(owner, "7").until_result() == (3, "it differs")


def test_ctrl_c_cancels_the_job_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CLUSTERDDP_RUNS", raising=False)
    monkeypatch.setattr(slurm_job, "fit", lambda job: job)
    monkeypatch.setattr(slurm_job, "submit", lambda *_: "7")
    monkeypatch.setattr(slurm_job.awaited_job, "end", ended.append)
    monkeypatch.setattr(slurm_job.awaited_job, "find", lambda _: signal.raise_signal(signal.SIGINT))
    assert slurm_job.check_in_job(Job("x", module="x", device="cpu"), 12) == 130
    assert ended == ["7"]
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_slurm_refuses_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> str:
        raise SlurmError("no partition 'lwo' on this cluster")

    monkeypatch.setenv("CLUSTERDDP_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(slurm_job, "fit", lambda job: job)
    monkeypatch.setattr(slurm_job, "submit", refuse)
    with pytest.raises(SlurmError, match="no partition 'lwo'"):
        slurm_job.check_in_job(Job("x", module="x", device="cpu"), 12)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "kind"), [(1, ClusterddpError), (3, ResumeDiffers), (4, NotRepeatable), (75, CheckUnfinished)]
)
def test_the_result_of_the_job_has_the_exit_code_of_the_local_form(code: int, kind: type[ClusterddpError]) -> None:
    with pytest.raises(ClusterddpError, match="what it says") as raised:
        conclude(code, "what it says")
    assert (type(raised.value), raised.value.exit_code) == (kind, code)
    assert conclude(0, "no difference") == 0


# --- the batch step


@pytest.fixture
def started(owner: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The folder and the steps of each check that a batch step has begun; it says where it was."""
    begun: list[tuple[str, int]] = []
    monkeypatch.setattr(batch_step, "prepare_process", lambda: None)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    with recorded(owner, Job("x", module="x", device="cpu", snapshot=True), created=True):
        write_steps(owner.path, 12)

    def found(made: AllocatedTrials, steps: int) -> str:
        assert made.owner is owner and made.job.snapshot is False  # the snapshot was taken when it was submitted
        begun.append((made.folder.name, steps))
        return f"no difference in {made.folder.name}"

    monkeypatch.setattr(batch_step, "result", found)
    return begun


def test_a_requeued_job_starts_over_and_one_with_a_result_does_not_start(
    owner: RunDirectory, started: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert batch_step.check(owner) == 0
    (owner.path / RESULT_FILE).unlink()  # preempted before it was written
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert batch_step.check(owner) == 0
    assert read_result(owner.path) == (0, "no difference in start-1")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")  # as 24.11 does after a requeue within a grace
    assert batch_step.check(owner) == 0
    assert started == [("start-0", 12), ("start-1", 12)]


@pytest.mark.parametrize(
    "error", [ResumeDiffers("it differs"), CheckUnfinished("preempted"), ClusterddpError("failed")]
)
def test_an_error_of_the_check_is_its_result(
    owner: RunDirectory, started: list[tuple[str, int]], error: ClusterddpError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(made: AllocatedTrials, steps: int) -> str:
        raise error

    monkeypatch.setattr(batch_step, "result", fail)
    assert batch_step.check(owner) == error.exit_code
    assert read_result(owner.path) == (error.exit_code, str(error))


def test_a_start_that_is_requeued_leaves_the_result_to_the_next_one(
    owner: RunDirectory, started: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(made: AllocatedTrials, steps: int) -> str:
        raise CheckUnfinished(trials.unfinished(Cause.REQUEUED.value))

    monkeypatch.setattr(batch_step, "result", stop)
    assert batch_step.check(owner) == 75
    assert read_result(owner.path) is None


def test_the_batch_script_ends_with_the_check_in_place_of_the_supervisor(owner: RunDirectory) -> None:
    last = script(Job("x", module="x", device="cpu"), owner).rstrip().splitlines()[-1]
    assert last.startswith("exec ") and "clusterddp.cli.resume_check.batch_step" in last
    assert last.endswith(f" {owner}")


def test_each_trial_uses_the_snapshot_that_was_taken_at_the_submission(owner: RunDirectory) -> None:
    """A checkout that changes while the job waits makes no difference."""
    (owner.code / "0123456789ab").mkdir(parents=True)
    (owner.code / "0123456789ab" / "train.py").write_text("as submitted")
    taken = {"snapshot": "0123456789ab", "checkout": "/home/me/checkout", "commit": None, "changes": None, "changed": 0}
    write_json(owner.code_file, taken)
    folder = owner.path / "start-0"
    folder.mkdir()
    made = AllocatedTrials(folder, Job("x", module="x", device="cpu"), owner)._trial(str(folder / "resumed"))
    used = code_snapshot.present(made.run)
    assert used is not None and (used.folder(made.run) / "train.py").read_text() == "as submitted"


# --- a stop that the check did not want


def history(run: RunDirectory, *events: tuple[int, str, str]) -> RunDirectory:
    for attempt, event, reason in events:
        (run.logs / f"attempt-{attempt}").mkdir(exist_ok=True)
        append_line(run.events_file, {"time": 1.0, "attempt": attempt, "event": event, "reason": reason})
    return run


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([(0, "stopping", WHY), (0, "stopped", "stopped by a signal")], ""),
        ([(0, "stopping", "SIGTERM"), (0, "stopped", "preempted")], "preempted"),
        ([(0, "stopping", WHY), (0, "stopped", ""), (1, "stopped", "preempted")], "preempted"),
        ([(0, "stopping", WHY), (1, "stopping", "SIGTERM")], "it was stopped before its first step"),
    ],
)
def test_a_stop_is_the_checks_only_if_its_ranks_say_so(
    owner: RunDirectory, events: Sequence[tuple[int, str, str]], why: str
) -> None:
    """Of the newest attempt."""
    assert stopped_by_others(history(owner, *events)) == why


def test_a_preempted_attempt_ends_the_check_in_words(owner: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trials._AllocatedInterruptions(owner, Job("x", module="x", device="cpu"))
    monkeypatch.setattr(made, "_attempt", lambda _: 130)
    history(owner, (0, "stopping", "SIGTERM"), (0, "stopped", "preempted"))
    with pytest.raises(CheckUnfinished, match=r"nothing was found out: preempted; start it again, if there is one in"):
        made.make(trials.Recording(3, owner.path), None)  # type: ignore[arg-type]
    made.interrupts = 1
    with pytest.raises(Interrupted):
        made.make(trials.Recording(3, owner.path), None)  # type: ignore[arg-type]


def test_too_many_steps_for_the_time_limit_are_said_after_the_first_run() -> None:
    assert short_of_time(100.0, 101.0) == ""
    assert short_of_time(100.0, 60.0).startswith(
        "resume check: these steps took 100 s, and 60 s are left until the job's time limit"
    )
