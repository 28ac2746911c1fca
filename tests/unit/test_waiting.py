"""What `wait --resubmit` does for a run, and never does; on a cluster it is tested in test_preemption_variants.py."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from clusterddp.cli import submit
from clusterddp.errors import INTERRUPTED, WAITED, SlurmError
from clusterddp.jobdef.job import Job
from clusterddp.rundir.claims import write_claim
from clusterddp.rundir.files import write_json
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.summary import Summary, summarize
from clusterddp.runs import waiting
from clusterddp.runs.run_status import state_sentence
from clusterddp.runs.waiting import Hold, Wait, Waiting
from clusterddp.slurm.commands import JobInfo
from clusterddp.slurm.run_states import Cause, RunState
from clusterddp.supervisor import lease
from tests.fake_slurm import FakeSlurm
from tests.histories import happened
from tests.runs_on_disk import jobs_of
from tests.wording import says

JOB = Job(name="x", module="x")
#: What the supervisor of the run's only attempt records when it could not ask, and when the run's next job was refused.
UNKNOWN = {"event": "stopped", "attempt": 0, "time": 2.0, "cause": Cause.UNKNOWN.value}
REFUSED = {**UNKNOWN, "cause": Cause.NONE.value, "refused": "sbatch: error: AssocMaxSubmitJobLimit"}


#: The beginning of the line that asks for a job.
SHOW_JOB = "scontrol show job"


def info(state: str, reason: str = "None", restarts: int = 0, preempted: bool = False, job: str = "41") -> JobInfo:
    return JobInfo(job, state, reason, "n1", restarts, 1.0 if preempted else None, None)


def jobs(*jobs: JobInfo) -> dict[str, JobInfo]:
    """What scontrol answers about each of these jobs."""
    return {f"{SHOW_JOB} -o {job.job_id}": job for job in jobs}


@pytest.fixture
def run(run: RunDirectory) -> RunDirectory:
    """A run whose job 41 has made attempt 0."""
    number = run.create_attempt()
    lease.take(run, number, lease.of_job("41"))
    happened(run, {"event": "started", "attempt": 0, "time": 1.0, "job": "41", "restarts": 0})
    return run


clock = [1000.0]


@pytest.fixture(autouse=True)
def nothing_queued(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue has no other job of the run."""
    monkeypatch.setattr(waiting.time, "monotonic", lambda: clock[0])
    monkeypatch.setenv("SLURM_CLUSTERS", "")  # no answer of squeue is shared
    monkeypatch.delenv("SLURM_CLUSTER_NAME", raising=False)
    fake_slurm["squeue"] = ""


@pytest.fixture
def submitted(fake_slurm: FakeSlurm) -> list[str]:
    """The submissions that were made."""
    made: list[str] = []

    def sbatch(*words: str) -> str:
        made.append(" ".join([Path(words[-1]).name, *words[2:-1]]))
        return "42"

    fake_slurm["sbatch"] = sbatch
    return made


class Resubmitter:
    """`wait --resubmit` for one run, by a clock that stands between two looks. squeue knows no job, scontrol does."""

    def __init__(self, run: RunDirectory, job: Job = JOB) -> None:
        self._wait = Wait(run, job)
        self._waiting = Waiting([self._wait])

    def look(self, after_s: float = 10.0) -> str | None:
        """Looks after this time, and says how the run ended."""
        clock[0] += after_s
        self._waiting.look(1)
        return self.end

    @property
    def end(self) -> str | None:
        """How the run ended. None until then."""
        return self._wait.end


def look(run: RunDirectory, job: JobInfo | None, fake_slurm: FakeSlurm) -> Resubmitter:
    fake_slurm[SHOW_JOB] = job
    resubmitter = Resubmitter(run)
    resubmitter.look()
    return resubmitter


@pytest.mark.parametrize(
    ("job", "asked", "resubmitted"),
    [
        (info("NODE_FAIL"), None, True),
        (info("TIMEOUT"), None, True),
        (info("FAILED", restarts=1), None, True),
        (info("FAILED"), None, True),
        (info("OUT_OF_MEMORY"), None, True),
        (info("FAILED"), UNKNOWN, False),
        (info("FAILED"), {"event": "started", "attempt": 1, "time": 2.0, "job": "40", "restarts": 0}, False),
        (info("COMPLETED", preempted=True), UNKNOWN, True),
        (info("COMPLETED", preempted=True), {**UNKNOWN, "cause": Cause.STOP_REQUESTED.value}, False),
        (info("COMPLETED", preempted=True, job="40"), UNKNOWN, False),
        (info("COMPLETED"), UNKNOWN, False),
        (info("CANCELLED", preempted=True), UNKNOWN, False),
        (None, UNKNOWN, False),
        (info("COMPLETED"), REFUSED, True),
        (info("COMPLETED", job="40"), REFUSED, False),
        (info("COMPLETED", restarts=1), REFUSED, False),
        (info("COMPLETED", restarts=1), {**REFUSED, "attempt": 1}, False),
        (info("CANCELLED"), REFUSED, False),
        (None, REFUSED, False),
    ],
)
def test_a_run_whose_job_ended_is_resubmitted_unless_it_was_ended_on_purpose(
    run: RunDirectory,
    submitted: list[str],
    fake_slurm: FakeSlurm,
    job: JobInfo | None,
    asked: dict[str, object] | None,
    resubmitted: bool,
) -> None:
    """A lost node, a start that failed, a supervisor that was killed, could not ask, or was refused: yes. scancel, the
    unknown, what another job or attempt recorded: never. It is in the history, a file that is known: a new file may
    stay hidden for a minute where the disk is shared, and the command ended meanwhile."""
    if asked is not None:
        happened(run, asked)
    resubmitter = look(run, job, fake_slurm)
    assert (submitted == ["job.sbatch"]) is resubmitted
    assert resubmitter.end is None
    if resubmitted:
        assert jobs_of(lease.holders(run))[0] == "42"
    else:
        assert resubmitter.look() == "stopped" and not submitted


@pytest.mark.parametrize(("saved", "resubmitted"), [(True, True), (False, False)])
def test_a_supervisor_that_is_killed_again_before_anything_is_saved_is_not_started_once_more(
    run: RunDirectory,
    submitted: list[str],
    fake_slurm: FakeSlurm,
    capsys: pytest.CaptureFixture[str],
    saved: bool,
    resubmitted: bool,
) -> None:
    """The next one would be killed, too, as by a lack of memory. The end of its log is shown."""
    lease.take(run, run.create_attempt(), lease.of_job("42"))
    happened(run, {"event": "started", "attempt": 1, "time": 2.0, "job": "42", "restarts": 0})
    if saved:
        happened(run, {"event": "checkpoint", "attempt": 1, "time": 3.0, "step": 3})
    (run.logs / "job-42.log").write_text("slurmstepd: error: Detected 1 oom_kill event\n")
    resubmitter = look(run, info("FAILED", job="42"), fake_slurm)
    assert (submitted == ["job.sbatch"]) is resubmitted
    if not resubmitted:
        assert resubmitter.look() == "stopped"
    assert ("oom_kill" in capsys.readouterr().err) is not resubmitted


@pytest.mark.parametrize("released", [False, True])
def test_a_run_whose_history_cannot_be_seen_yet_may_have_been_stopped(
    tmp_path: Path, submitted: list[str], fake_slurm: FakeSlurm, released: bool
) -> None:
    """A shared disk may hide the first lines of a history. A run was resubmitted that its user had just stopped."""
    run = RunDirectory(tmp_path / "run")
    run.create()
    lease.submitted(run, "41")
    if released:
        lease.take(run, run.create_attempt(), lease.of_job("41"))
        lease.let_go(run, 0)
    resubmitter = look(run, info("PREEMPTED"), fake_slurm)
    assert not resubmitter.look(60) and submitted == []
    resubmitter.look(40)
    assert submitted == ["job.sbatch"]


def test_an_attempt_that_a_shared_disk_does_not_show_yet_does_not_end_the_waiting(
    tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another node's folder may stay hidden for a minute: then the submission that led to it holds the run. Once the
    attempt can be seen, or has released the run, it does not."""
    run = RunDirectory(tmp_path / "run")
    run.create()
    lease.submitted(run, "41")
    assert jobs_of([lease.take(run, run.create_attempt(), lease.of_job("41"))]) == ["41"]
    assert lease.take(run, run.create_attempt(), lease.of_job("41")) is None
    assert [claim.attempt for claim in lease.holders(run)] == [None], "the submission counts as well"
    monkeypatch.setattr(RunDirectory, "attempts", lambda _: [])
    assert look(run, info("RUNNING"), fake_slurm).end is None
    lease.let_go(run, 1)
    assert lease.holders(run) == []


def test_a_job_whose_submission_is_recorded_only_after_it_has_started_releases_the_run(run: RunDirectory) -> None:
    """sbatch's answer may come late. The next job then ended as it started, because the run seemed to be held."""
    lease.submitted(run, "41")
    lease.let_go(run, 0)
    assert lease.holders(run) == []


def test_a_claim_that_another_process_has_removed_is_made_again(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has just submitted the run removes older claims. `wait --resubmit` had crashed."""
    real, looks = lease._submissions, 0

    def submissions(run: RunDirectory) -> dict[int, Path]:
        nonlocal looks
        looks += 1
        if looks == 2:
            (run.private / "submitting-0.json").unlink()
        return real(run)

    monkeypatch.setattr(lease, "_submissions", submissions)
    with lease.submitting(run) as other:
        assert other is None and list(real(run)) == [0]
    assert real(run) == {}


def test_an_attempt_whose_holder_a_shared_disk_does_not_show_yet_is_held_by_its_submission(
    tmp_path: Path, fake_slurm: FakeSlurm
) -> None:
    """A node that looked into the attempt's folder in its first moment sees its files up to a minute later:
    the run was taken for stopped, and a second submission would have been accepted."""
    run = RunDirectory(tmp_path / "run")
    run.create()
    lease.submitted(run, "41")
    lease.take(run, run.create_attempt(), lease.of_job("41"))
    run.holder_file(0).unlink()
    assert jobs_of(lease.holders(run)) == ["41"]
    assert jobs_of(summarize(run).claims) == ["41"]
    assert look(run, info("RUNNING"), fake_slurm).end is None


def test_an_outcome_that_a_shared_disk_does_not_show_yet_is_waited_for(
    run: RunDirectory, fake_slurm: FakeSlurm
) -> None:
    """The history, a file that is known, says that the run is over. After a minute and a half it has no outcome."""
    happened(run, {"event": "completed", "attempt": 0, "time": 2.0, "step": 9, "reason": "done"})
    resubmitter = look(run, info("COMPLETED"), fake_slurm)
    assert not resubmitter.look(60)
    assert resubmitter.look(40) == "stopped"


@pytest.mark.parametrize(
    ("events", "job", "over"),
    [
        ([], "COMPLETED", True),
        (["started"], "COMPLETED", True),  # a full disk did not take the end
        (["started"], "FAILED", False),
        (["started", "stopped"], "COMPLETED", False),
        (["started", "completed"], "CANCELLED", True),
    ],
)
def test_a_run_may_be_over_before_its_outcome_can_be_seen(
    tmp_path: Path, events: list[str], job: str, over: bool
) -> None:
    """`wait`, with and without `--resubmit`, then wait for the outcome. They said that a completed run was stopped."""
    run = RunDirectory(tmp_path / "run")
    run.create()
    for event in events:
        happened(run, {"event": event, "attempt": 0, "time": 1.0})
    assert run.may_be_over(job) is over


def test_a_disk_that_does_not_answer_for_a_while_does_not_end_the_waiting(
    run: RunDirectory,
    fake_slurm: FakeSlurm,
    submitted: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run may need it all the more afterwards. An error that lasts does, as of a run that was deleted."""
    fake_slurm[SHOW_JOB] = info("NODE_FAIL")
    resubmitter = Resubmitter(run)
    with monkeypatch.context() as away:
        away.setattr(RunDirectory, "outcome", lambda _: fail(errno.EIO))
        assert not resubmitter.look() and not resubmitter.look(400)
        away.setattr(RunDirectory, "outcome", lambda _: fail(errno.EACCES))
        assert Resubmitter(run).look() == "unknown"
    says(capsys.readouterr().err)
    resubmitter.look()
    assert submitted == ["job.sbatch"]


def fail(code: int) -> None:
    raise OSError(code, os.strerror(code), "outcome.json")


def test_a_job_that_was_submitted_and_not_recorded_is_found_before_another_one_is_submitted(
    run: RunDirectory, submitted: list[str], fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    """sbatch's answer was lost, or whoever gave the command was killed before it came."""
    fake_slurm["squeue --noheader"] = f"77|{run.batch_script}\n78|/other\n"
    resubmitter = look(run, info("NODE_FAIL"), fake_slurm)
    assert (submitted, resubmitter.end, jobs_of(lease.holders(run))[0]) == ([], None, "77")
    says(capsys.readouterr().err)


def test_a_job_that_is_submitted_while_slurm_is_asked_about_the_last_one_is_waited_for(
    run: RunDirectory, submitted: list[str], fake_slurm: FakeSlurm
) -> None:
    """The last one ended as COMPLETED, once it had submitted the next (seed 40468686)."""

    happened(run, {"event": "resubmitted", "attempt": 0, "time": 2.0, "job": "42"})

    def show_job(*words: str) -> JobInfo:
        lease.submitted(run, "42")
        return info("COMPLETED", job=words[-1])

    fake_slurm[SHOW_JOB] = show_job
    resubmitter = Resubmitter(run)
    resubmitter.look()
    assert (submitted, resubmitter.end) == ([], None)


def test_a_run_that_completes_while_slurm_is_asked_for_its_jobs_is_not_submitted(
    run: RunDirectory, submitted: list[str], fake_slurm: FakeSlurm
) -> None:
    """An administrator requeued the job after its end. Slurm limited the rate of requests (seed 50516861)."""

    def squeue(*_: str) -> str:
        write_json(run.outcome_file, {"state": "completed", "step": 9, "reason": "done"})
        return ""

    fake_slurm["squeue --noheader"] = squeue
    look(run, info("TIMEOUT"), fake_slurm)
    assert submitted == []


def test_an_earlier_job_that_still_leaves_its_nodes_does_not_continue_the_run(
    run: RunDirectory, submitted: list[str], fake_slurm: FakeSlurm
) -> None:
    """It is COMPLETING until Slurm gives up its lost node (seed 20420625)."""
    fake_slurm |= jobs(info("NODE_FAIL"), info("COMPLETING", job="40"))
    fake_slurm["squeue --noheader"] = f"40|{run.batch_script}\n"
    resubmitter = Resubmitter(run)
    resubmitter.look()
    assert (submitted, resubmitter.end, jobs_of(lease.holders(run))[0]) == ([], None, "41")
    fake_slurm["squeue --noheader"] = ""
    resubmitter.look()
    assert submitted == ["job.sbatch"]


@pytest.mark.parametrize(("usable", "options"), [(["n1", "n2"], " --exclude=n2"), (["n2"], "")])
def test_a_node_that_failed_the_run_twice_stays_excluded(
    run: RunDirectory, submitted: list[str], fake_slurm: FakeSlurm, usable: list[str], options: str
) -> None:
    """Where another one works."""
    happened(run, {"event": "excluded", "attempt": 0, "time": time.time(), "nodes": ["n2"]})
    fake_slurm |= {"sinfo": "".join(f"low|low*|{node}|idle\n" for node in usable), "scontrol show config": ""}
    look(run, info("NODE_FAIL"), fake_slurm)
    assert submitted == [f"job.sbatch{options}"]


def test_of_two_resubmitters_at_the_same_moment_one_resubmits(
    run: RunDirectory, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    """`submit --wait` and `Handle.wait()`; the other one says so, and waits for the new job."""
    fake_slurm |= jobs(info("NODE_FAIL"), info("RUNNING", job="42"))
    other = Resubmitter(run)

    def sbatch(*_: str) -> str:
        other.look()  # while sbatch runs
        return "42"

    fake_slurm["sbatch"] = sbatch
    Resubmitter(run).look()
    assert fake_slurm.count("sbatch") == 1
    says(capsys.readouterr().err)
    other.look()
    assert fake_slurm.count("sbatch") == 1 and other.end is None
    says(capsys.readouterr().err)


def test_a_resubmitter_that_learned_of_the_end_before_another_resubmitted_leaves_it_at_that(
    run: RunDirectory, submitted: list[str], fake_slurm: FakeSlurm
) -> None:
    """It decided by the old claims."""

    def show_job(*words: str) -> JobInfo:
        lease.submitted(run, "42")  # by the other resubmitter, meanwhile
        return info("NODE_FAIL", job=words[-1])

    fake_slurm[SHOW_JOB] = show_job
    resubmitter = Resubmitter(run)
    resubmitter.look()
    assert submitted == [] and resubmitter.end is None


def test_a_job_that_needs_no_help_is_asked_about_by_the_question_that_commands_share(
    run: RunDirectory, fake_slurm: FakeSlurm
) -> None:
    """Until squeue shows another state, or that job no more."""
    fake_slurm[SHOW_JOB] = info("COMPLETING")
    resubmitter = Resubmitter(run)
    for state, shown in (("RUNNING", 0), ("PENDING", 0), ("RUNNING", 0), ("COMPLETING", 1), (None, 2)):
        fake_slurm["squeue --all"] = f"41|{state}|n1|N/A|1:00|low|None\n" if state else ""
        resubmitter.look()
        assert fake_slurm.count(SHOW_JOB) == shown and resubmitter.end is None
    assert fake_slurm.count("squeue --all") == 5


@pytest.mark.parametrize("earlier", [True, False])
def test_a_job_that_ended_before_its_supervisor_started_is_not_submitted_again_and_its_log_is_shown(
    run: RunDirectory,
    submitted: list[str],
    fake_slurm: FakeSlurm,
    capsys: pytest.CaptureFixture[str],
    earlier: bool,
) -> None:
    """It would end in the same way."""
    if not earlier:
        run.events_file.unlink()
    lease.submitted(run, "42")
    (run.logs / "job-42.log").write_text("module: cannot load cuda\nslurm_script: line 20: python: not found\n")
    resubmitter = look(run, info("FAILED", job="42"), fake_slurm)
    assert (submitted, resubmitter.look()) == ([], "failed")
    says(capsys.readouterr().err)


def test_a_released_run_whose_first_attempt_a_shared_disk_hides_is_waited_for(
    run: RunDirectory, submitted: list[str], fake_slurm: FakeSlurm
) -> None:
    """Its job is about to submit the next one after a lost node (seed 20007627)."""
    resubmitter = look(run, info("RUNNING"), fake_slurm)
    for folder in (run.attempt_private(0), run.attempt_logs(0)):
        shutil.rmtree(folder, ignore_errors=True)
    resubmitter.look()
    assert (submitted, resubmitter.end) == ([], None)
    assert resubmitter.look(100) == "stopped"


@pytest.mark.parametrize(("ended", "resubmitted"), [(20.0, ["job.sbatch"]), (5.0, [])])
def test_a_job_that_found_the_run_held_gives_way_to_the_end_of_the_one_that_held_it(
    run: RunDirectory, submitted: list[str], fake_slurm: FakeSlurm, ended: float, resubmitted: list[str]
) -> None:
    """Only if that one ended later (seed 20438082). Otherwise the next job would end as the new one did."""
    lease.submitted(run, "42")
    held = dataclasses.replace(info("TIMEOUT"), end_time=ended)
    fake_slurm |= jobs(held, dataclasses.replace(info("FAILED", job="42"), end_time=10.0))
    resubmitter = Resubmitter(run)
    resubmitter.look()
    assert submitted == resubmitted
    if not resubmitted:
        assert resubmitter.look() == "stopped"


def test_a_job_of_which_nothing_is_visible_yet_may_have_completed_the_run(
    run: RunDirectory, submitted: list[str], fake_slurm: FakeSlurm
) -> None:
    """A shared disk may hide its attempt, history, log and outcome alike, and a run that was killed just after its
    outcome was called failed."""
    run.events_file.unlink()
    lease.submitted(run, "42")
    resubmitter = look(run, info("FAILED", job="42"), fake_slurm)
    assert resubmitter.look(60) is None
    assert resubmitter.look(40) == "stopped"


def test_an_attempt_that_is_just_being_claimed_leaves_no_gap_in_who_holds_the_run(run: RunDirectory) -> None:
    """Its folder is there, its entry not yet: the one before still holds the run."""
    run.create_attempt()
    assert lease.holders(run) == [lease.of_job("41")]


def test_a_run_that_another_job_continues_is_left_to_it(
    run: RunDirectory, submitted: list[str], fake_slurm: FakeSlurm
) -> None:
    """A job whose submission got no answer existed after all: the one submitted in its place has exited."""
    lease.take(run, run.create_attempt(), lease.of_job("42"))
    lease.submitted(run, "43")
    fake_slurm |= jobs(info("RUNNING", job="42"), info("FAILED", job="43"))
    resubmitter = Resubmitter(run)
    resubmitter.look()
    assert (submitted, resubmitter.end) == ([], None)


def test_a_run_whose_job_is_just_submitting_the_next_one_is_still_waited_for(
    run: RunDirectory, submitted: list[str], fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a lost node the job releases the run before sbatch answers, which may take minutes (seed 6773)."""
    lease.let_go(run, 0)
    assert look(run, info("RUNNING"), fake_slurm).end is None
    says(capsys.readouterr().err)
    resubmitter = look(run, info("COMPLETED"), fake_slurm)
    assert resubmitter.look(100) == "stopped"
    assert submitted == []


@pytest.mark.parametrize(
    ("state", "ends", "continues"),
    [
        ("NODE_FAIL", [], True),
        ("CANCELLED", [], False),
        ("NODE_FAIL", [{**UNKNOWN, "reason": "x"}], False),
        ("COMPLETED", [REFUSED], True),
    ],
)
def test_a_run_whose_job_died_while_it_submitted_the_next_one_is_submitted(
    run: RunDirectory,
    submitted: list[str],
    fake_slurm: FakeSlurm,
    state: str,
    ends: list[dict[str, object]],
    continues: bool,
) -> None:
    """It had released the run, so that the command took it for stopped. One that has recorded its end is stopped,
    unless Slurm refused its next job."""
    lease.let_go(run, 0)
    for end in ends:
        happened(run, end)
    resubmitter = look(run, info(state), fake_slurm)
    assert (submitted == ["job.sbatch"]) is continues
    if not continues:
        assert resubmitter.look() == "stopped"


def test_a_resubmitter_retries_what_slurm_refuses(
    run: RunDirectory, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says Slurm's reason, once."""
    fake_slurm["sbatch"] = [*[SlurmError("AssocMaxSubmitJobLimit")] * 2, "42"]
    fake_slurm[SHOW_JOB] = info("COMPLETED")
    happened(run, REFUSED)
    resubmitter = Resubmitter(run)
    for _ in range(3):
        resubmitter.look()
    said = capsys.readouterr().err
    assert said.count("run: retrying: AssocMaxSubmitJobLimit\n") == 1
    says(said)


def test_what_slurm_refuses_is_not_asked_for_every_second(run: RunDirectory, fake_slurm: FakeSlurm) -> None:
    """A limit on submitted jobs may last for hours."""
    fake_slurm["sbatch"] = SlurmError("AssocMaxSubmitJobLimit")
    resubmitter = look(run, info("NODE_FAIL"), fake_slurm)
    for _ in range(600):
        resubmitter.look(1.0)
    assert resubmitter.end is None and 600 / 7 < fake_slurm.count("sbatch") < 600 / 4


def test_a_job_that_slurm_forgets_while_it_refuses_the_next_one_is_remembered(
    run: RunDirectory, fake_slurm: FakeSlurm
) -> None:
    """Slurm forgets a job MinJobAge after its end. Why it ended decides whether the run continues."""
    fake_slurm[SHOW_JOB] = [info("NODE_FAIL"), None]
    fake_slurm["sbatch"] = [SlurmError("AssocMaxSubmitJobLimit"), "42"]
    resubmitter = Resubmitter(run)
    for _ in range(2):
        resubmitter.look()
    assert (resubmitter.end, jobs_of(lease.holders(run))[0]) == (None, "42")


def test_waiting_ends_as_soon_as_the_user_has_stopped_the_run(
    run: RunDirectory, submitted: list[str], fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    """With how to continue it."""
    happened(run, {"event": "requested", "attempt": 0, "time": 2.0, "request": "stop"})
    lease.let_go(run, 0)
    resubmitter = look(run, info("TIMEOUT"), fake_slurm)
    assert resubmitter.look() == "stopped" and not submitted
    says(capsys.readouterr().err)


def test_a_run_that_is_not_to_continue_is_not_resubmitted(
    run: RunDirectory, submitted: list[str], fake_slurm: FakeSlurm
) -> None:
    """``continue: false``; not even after a lost node."""
    fake_slurm[SHOW_JOB] = info("NODE_FAIL")
    resubmitter = Resubmitter(run, dataclasses.replace(JOB, continues=False))
    resubmitter.look()
    assert resubmitter.look() == "stopped" and submitted == []


def test_a_cancelled_run_is_never_resubmitted(run: RunDirectory, submitted: list[str], fake_slurm: FakeSlurm) -> None:
    """Whatever became of its job."""
    run.mark_cancelled()
    look(run, info("NODE_FAIL"), fake_slurm)
    assert submitted == []


def test_a_hold_is_lifted_only_after_slurmd_accepts_a_new_credential(fake_slurm: FakeSlurm) -> None:
    """Lifted within the second of the requeue, the job would be FAILED for good: credential revoked."""
    fake_slurm["scontrol update"] = ""
    hold, held = Hold(), info("PENDING", "BeginTime", restarts=1)
    assert not hold.lift_when_safe(held)
    clock[0] += waiting.SETTLE_S - 0.1
    assert not hold.lift_when_safe(held)
    clock[0] += 0.2
    assert hold.lift_when_safe(held)
    assert fake_slurm.asked == ["scontrol update JobId=41 StartTime=now"]
    assert not hold.lift_when_safe(info("PENDING", "BeginTime", restarts=2)), "the next requeue, unseen in between"
    clock[0] += waiting.SETTLE_S + 1
    assert not hold.lift_when_safe(info("PENDING", "BeginTime", restarts=2, job="42")), "of the run's next job"
    assert not hold.lift_when_safe(info("PENDING", "Resources", restarts=1))
    assert not hold.lift_when_safe(info("PENDING", "BeginTime", restarts=0)), "the user's own --begin"


def test_a_run_that_cannot_be_read_does_not_end_the_waiting_for_the_others(
    run: RunDirectory, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = RunDirectory(run.path.with_name("damaged"))
    damaged.create()
    damaged.outcome_file.write_text("garbage")
    for one in (damaged, run):
        one.job_file.write_text("module: x\n")
    fake_slurm[SHOW_JOB] = info("RUNNING")

    def sleep(_: float) -> None:
        clock[0] += 10
        if f"{damaged}: no longer waiting" in (said := capsys.readouterr().err):
            assert f"{damaged.outcome_file} is not JSON" in said
            write_json(run.outcome_file, {"state": "completed", "step": 7, "reason": "why"})

    monkeypatch.setattr(waiting.time, "sleep", sleep)
    assert waiting.wait([damaged, run], resubmit=True) == WAITED["unknown"]


@pytest.mark.parametrize(("others", "code"), [([], 14), (["completed"], 14), (["completed", "failed"], 10)])
def test_a_completion_that_is_not_confirmed_has_an_exit_code_of_its_own(
    run: RunDirectory, others: list[str], code: int
) -> None:
    """A failed run counts for more."""
    runs = [run, *(RunDirectory(run.path.with_name(state)) for state in others)]
    for one, state in zip(runs, ["completed", *others], strict=True):
        one.create()
        one.job_file.write_text("module: x\n")
        write_json(one.outcome_file, {"state": state, "step": None, "reason": "why"})
    write_json(run.outcome_file, {"state": "completed", "step": None, "reason": "unconfirmed: why", "confirmed": False})
    assert waiting.wait(runs, resubmit=True) == code


def test_each_event_of_several_runs_names_its_run(
    run: RunDirectory, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As members of a sweep; of one run alone it would be noise."""
    other = RunDirectory(run.path.with_name("other"))
    other.create()
    for one in (run, other):
        one.job_file.write_text("module: x\n")
    fake_slurm[SHOW_JOB] = info("RUNNING")
    resumed = {"time": 1.0, "attempt": 0, "event": "resumed", "step": 7, "parent": {"attempt": 0, "step": 7}}

    def end(_: float) -> None:
        for one in (run, other):
            happened(one, resumed)
            write_json(one.outcome_file, {"state": "completed", "step": 7, "reason": "why"})

    monkeypatch.setattr(waiting.time, "sleep", end)
    assert waiting.wait([run, other], resubmit=True) == 0
    shown = capsys.readouterr().err
    for one in (run, other):
        assert f"{one.path.name}: attempt 0: resumed from step 7\n" in shown
    run.outcome_file.unlink()
    assert waiting.wait([run], resubmit=True) == 0
    assert "\nattempt 0: resumed from step 7\n" in f"\n{capsys.readouterr().err}"


def test_a_local_run_is_waited_for_and_a_stopped_one_named_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No Slurm job holds either."""
    run = RunDirectory(tmp_path / "run")
    run.create()
    write_claim(run.loop_file, run, lease.of_this_process())
    local = Resubmitter(run)
    assert local.look() is None
    lease.take(run, run.create_attempt(), lease.of_this_process())
    assert local.look() is None
    starting, trains = capsys.readouterr().err.splitlines()
    assert starting == "run: running (local run, starting)"
    assert re.fullmatch(r"run: running \(process \d+ on this machine\)", trains)
    write_claim(run.loop_file, run, replace(lease.of_this_process(), process_start="1"))
    write_claim(run.holder_file(0), run, replace(lease.of_this_process(), process_start="1"))
    assert (local.look(100), local.look()) == (None, "stopped")
    says(capsys.readouterr().err)


def test_ctrl_c_before_the_wait_of_a_submission_begins_says_that_the_run_continues(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While its module is imported, or the run's records are opened."""

    def interrupted(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(submit, "submit_to_slurm", lambda *_: (run, "41"))
    monkeypatch.setattr(submit, "tell_of_rehearsal", lambda _: None)
    monkeypatch.setattr(waiting, "wait", interrupted)
    arguments = SimpleNamespace(dry_run=False, when=False, run_dir=None, wait=True, follow=False, fork=None, debug=None)
    assert submit.submit_slurm(arguments, JOB) == INTERRUPTED  # type: ignore[arg-type]
    says(capsys.readouterr().err)


def test_a_failed_local_run_is_continued_locally(tmp_path: Path) -> None:
    """The command would otherwise submit a job."""
    run = RunDirectory(tmp_path / "run")
    run.create()
    summary, failed = Summary(run, "run"), RunState("failed", "the job ended")
    assert f"clusterddp submit --run-dir {run}" in state_sentence(summary, failed)
    write_claim(run.loop_file, run, lease.of_this_process())
    assert f"clusterddp submit --local --run-dir {run}" in state_sentence(summary, failed)
