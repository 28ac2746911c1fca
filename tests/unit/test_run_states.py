"""The states of runs, from one call of squeue, and why jobs wait, in words."""

from __future__ import annotations

import dataclasses
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterddp.errors import SlurmError, SlurmUnavailable
from clusterddp.process import process_start
from clusterddp.rundir.claims import ProcessClaim
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.summary import summarize
from clusterddp.slurm.queue import QueuedJob, is_hold, parse_queue, why_waiting
from clusterddp.slurm.run_states import RunState, run_states
from tests.fake_slurm import FakeSlurm
from tests.runs_on_disk import event, of_job, recorded_run, started
from tests.wording import says

PENDING = "41|PENDING||2026-11-23T08:00:00|1:00:00|gpu|"
REQUEUED = [started(), event("requeued", reason="preempted", cause="preempted", step=3, checkpoint=3, window_s=1.0)]


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_CLUSTERS", raising=False)
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "here")


def state_of(run: RunDirectory) -> RunState:
    return run_states([summarize(run)])[0]


NOT_FOUND = "slurm_script: line 20: /home/me/venv/bin/python: No such file or directory"
ENDED = "41|{}|n1|2026-11-22T08:00:00|1:00:00|gpu|NonZeroExitCode"


@pytest.mark.parametrize(
    ("line", "word", "reason"),
    [
        ("41|RUNNING|n[1-2]|2026-11-22T08:00:00|1:00:00|gpu|None", "running", "submitting the next job"),
        ("41|NODE_FAIL|n[1-2]|2026-11-22T08:00:00|1:00:00|gpu|None", "stopped", "job 41 ended: NODE_FAIL"),
        ("error: Unable to contact slurm controller", "unknown", "Slurm controller unreachable"),
    ],
)
def test_a_run_whose_job_has_released_it_continues_as_long_as_the_job_may_submit_the_next_one(
    tmp_path: Path, fake_slurm: FakeSlurm, line: str, word: str, reason: str
) -> None:
    """After a lost node. `wait` once ended while the controller was slow (seed 50726427)."""
    run = recorded_run(tmp_path / "run", [started()], holder=replace(of_job(), let_go=True))
    fake_slurm["squeue"] = SlurmError(line) if line.startswith("error: ") else line
    found = state_of(run)
    assert (found.word, found.job_id) == (word, "41")
    assert found.reason.startswith(reason)


@pytest.mark.parametrize(
    ("line", "log", "word", "reason"),
    [
        (ENDED.format("FAILED"), NOT_FOUND, "failed", f"(FAILED) before it started the supervisor: {NOT_FOUND}"),
        (ENDED.format("COMPLETED"), NOT_FOUND, "failed", f"(COMPLETED) before it started the supervisor: {NOT_FOUND}"),
        ("", NOT_FOUND, "failed", f"job 41 ended before it started the supervisor: {NOT_FOUND}"),
        (ENDED.format("FAILED"), "", "failed", "and wrote no log. Check that its nodes can access"),
        (ENDED.format("NODE_FAIL"), NOT_FOUND, "stopped", "job 41 ended: NODE_FAIL"),
        (ENDED.format("CANCELLED"), NOT_FOUND, "stopped", "job 41 ended: CANCELLED"),
        (ENDED.format("RUNNING"), NOT_FOUND, "running", ""),
    ],
)
def test_a_job_that_ended_before_its_supervisor_started_is_a_failure_with_the_end_of_its_log(
    tmp_path: Path, fake_slurm: FakeSlurm, line: str, log: str, word: str, reason: str
) -> None:
    """Such as an interpreter that the nodes do not have; also of a run that had attempts before."""
    fake_slurm["squeue"] = line
    claim = replace(of_job(), time=1.0)
    for run in (
        recorded_run(tmp_path / "new", submitted=claim),
        recorded_run(tmp_path / "old", [started(job="40")], submitted=claim),
    ):
        (run.logs / "job-41.log").write_text(f"loading modules\n\n{log}\n" if log else "")
        found = state_of(run)
        assert found.word == word and reason in found.reason
        assert found.log == (("loading modules", log) if log and word == "failed" else ())


def test_a_job_whose_supervisor_took_the_run_over_is_judged_by_its_history(
    tmp_path: Path, fake_slurm: FakeSlurm
) -> None:
    """Also if it did so before `submit` had written the submission's claim, which it would have removed."""
    fake_slurm["squeue"] = ENDED.format("FAILED")
    for files in ({}, {"submitted": replace(of_job(), time=1.0)}):
        run = recorded_run(tmp_path / str(len(files)), [started()], holder=of_job(), **files)
        (run.logs / "job-41.log").write_text(NOT_FOUND)
        found = state_of(run)
        assert (found.word, found.log) == ("stopped", (NOT_FOUND,))
        assert NOT_FOUND in found.reason


@pytest.mark.parametrize(
    ("end", "explained"),
    [
        ({"event": "stopped", "reason": "Could not resubmit the run"}, True),
        ({"event": "stopped", "reason": "preempted", "then": "requeued by Slurm"}, False),
        ({"event": "requeued", "reason": "preempted"}, False),
        (None, False),
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_the_log_of_a_job_tells_how_it_ended_unless_its_supervisor_did(
    tmp_path: Path, fake_slurm: FakeSlurm, end: dict[str, str] | None, explained: bool, known: bool
) -> None:
    """A supervisor that was killed, or refused to start after a requeue, has only written there."""
    fake_slurm["squeue"] = ENDED.format("FAILED") if known else ""
    events = [started(), *([{"attempt": 0, "time": 9.0, **end}] if end else [])]
    run = recorded_run(tmp_path / "run", events, holder=of_job())
    (run.logs / "job-41.log").write_text("attempt 0: started\nclusterddp: too few open files\n")
    found = state_of(run)
    assert found.word == "stopped"
    assert ("too few open files" in found.reason) is not explained
    assert (found.log == ()) is explained


@pytest.mark.parametrize(
    ("line", "word", "reason"),
    [
        ("41|RUNNING|n[1-2]|2026-11-22T08:00:00|1:00:00|gpu|None", "running", ""),
        ("41|CONFIGURING|n1|2026-11-22T08:00:00|1:00:00|gpu|None", "running", ""),
        ("41|SUSPENDED|n1|2026-11-22T08:00:00|1:00:00|gpu|None", "running", "suspended"),
        (f"{PENDING}Priority", "pending", "jobs with a higher priority start first"),
        (f"{PENDING}BeginTime", "pending", "its begin time is in the future"),
        (f"{PENDING}JobHeldUser", "held", "held by its owner"),
        (
            "41|REQUEUE_HOLD||N/A|1:00:00|gpu|job requeued in held state",
            "held",
            "held, because the job was requeued with a hold",
        ),
        ("41|TIMEOUT|n1|2026-11-22T08:00:00|1:00:00|gpu|TimeLimit", "stopped", "job 41 ended: TIMEOUT"),
        ("", "stopped", "not started"),
    ],
)
def test_a_submitted_runs_state_is_its_jobs(
    tmp_path: Path, fake_slurm: FakeSlurm, line: str, word: str, reason: str
) -> None:
    """As squeue prints it; a job that Slurm has forgotten trains nothing."""
    fake_slurm["squeue"] = f"{line}\n"
    found = state_of(recorded_run(tmp_path / "net-0", submitted=of_job()))
    assert (found.word, found.reason, found.job_id) == (word, reason, "41")


def test_the_hold_after_a_requeue_is_told_from_a_later_begin(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    """The job has run before: its begin time is the end of Slurm's hold, which its owner may lift."""
    fake_slurm["squeue"] = f"{PENDING}BeginTime\n"
    found = state_of(recorded_run(tmp_path / "net 0", REQUEUED, holder=of_job()))
    assert (found.word, found.reason) == ("held", "held by Slurm for a while, which happens after each requeue")
    assert f"`clusterddp wait --resubmit '{tmp_path}/net 0'` lifts the hold" in found.remedy
    assert found.job is not None and found.job.start is not None


def test_squeue_is_called_once_for_all_runs_and_not_at_all_without_jobs(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    """Array tasks by their own ids; runs that are over or local need no job."""
    over = recorded_run(tmp_path / "a", [started()], outcome={"state": "failed", "reason": "limit"}, holder=of_job())
    runs = [recorded_run(tmp_path / f"b{n}", submitted=of_job(f"7_{n}")) for n in range(3)]
    fake_slurm["squeue"] = "7_0|RUNNING|n1|N/A|1:00|gpu|None\n7_1|PENDING||N/A|1:00|gpu|Resources\n"
    states = run_states([summarize(run) for run in [over, *runs]])
    assert [state.word for state in states] == ["failed", "running", "pending", "stopped"]
    assert (states[0].reason, states[0].job_id, states[0].nodes) == ("limit", "41", "n[1-2]")
    (*_, ids, _, _) = fake_slurm.asked[0].split()
    assert ids == "7_0,7_1,7_2"
    run_states([summarize(over)])
    assert len(fake_slurm.asked) == 1


def test_thousands_of_jobs_are_listed_without_naming_them(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    """Their ids could be longer than a command line."""
    fake_slurm["squeue"] = "17|RUNNING|n1|N/A|1:00|gpu|None\n99999|RUNNING|n1|N/A|1:00|gpu|None\n"
    summary = summarize(recorded_run(tmp_path / "a", submitted=of_job()))
    many = [dataclasses.replace(summary, claims=(of_job(str(number)),)) for number in range(3000)]
    assert [state.word for state in run_states(many)].count("running") == 1
    assert len(fake_slurm.asked) == 1 and "-j" not in fake_slurm.asked[0]


def test_an_unreachable_controller_leaves_only_live_runs_unknown(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    """A single job that it does not know is another matter."""
    over = recorded_run(tmp_path / "a", [started()], outcome={"state": "completed"})
    live = recorded_run(tmp_path / "b", submitted=of_job())
    fake_slurm["squeue"] = SlurmError("error: Unable to contact slurm controller")
    states = run_states([summarize(over), summarize(live)])
    assert [state.word for state in states] == ["completed", "unknown"]
    assert states[1].reason == "Slurm controller unreachable: error: Unable to contact slurm controller"
    fake_slurm["squeue"] = SlurmError("error: slurm_load_jobs error: Invalid job id specified")
    assert state_of(live).word == "stopped"


def test_squeue_that_cannot_be_understood_is_no_proof_that_a_job_ended(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    """A wrong line must not make a run look stopped; lines of a site's wrapper are no jobs."""
    fake_slurm["squeue"] = "41|RUNNING\n"
    found = state_of(recorded_run(tmp_path / "b", submitted=of_job()))
    assert found.word == "unknown" and "could not parse the output of squeue" in found.reason
    assert parse_queue("CLUSTER: here\nWelcome | to 41\n\n") == {}


def test_a_job_of_another_cluster_is_not_looked_up_here(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    """Job ids are unique within a cluster."""
    fake_slurm["squeue"] = "41|RUNNING|n1|N/A|1:00|gpu|None\n"
    found = state_of(recorded_run(tmp_path / "b", submitted=replace(of_job(), cluster="there")))
    assert (found.word, found.reason) == ("unknown", "job 41 of cluster there cannot be reached from here")
    assert fake_slurm.asked == []


def local(pid: int, **changed: Any) -> ProcessClaim:
    return replace(ProcessClaim(socket.gethostname(), pid, process_start=process_start(pid)), **changed)


def test_a_local_run_runs_as_long_as_its_processes(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    """On this machine; elsewhere, nobody can tell."""
    fake_slurm["squeue"] = ""
    begun = event("started", pid=1, restarts=0, nodes="host", ranks=1, code={}, changed=[])
    ended = local(os.getpid(), process_start="1")
    assert state_of(recorded_run(tmp_path / "a", [begun], holder=local(os.getpid()))).word == "running"
    between = state_of(recorded_run(tmp_path / "b", [begun], holder=ended, loop=local(os.getpid())))
    assert (between.word, between.reason) == ("running", "local run, between two attempts")
    assert state_of(recorded_run(tmp_path / "c", [begun], holder=ended)).word == "stopped"
    elsewhere = state_of(recorded_run(tmp_path / "d", [begun], holder=local(7, host="other")))
    assert (elsewhere.word, elsewhere.nodes) == ("unknown", "other")
    assert fake_slurm.asked == []


def test_a_cancelled_run_whose_outcome_nobody_wrote_is_cancelled(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    """As on a full disk: nothing will start it again."""
    fake_slurm["squeue"] = ""
    run = recorded_run(tmp_path / "a", submitted=of_job())
    run.mark_cancelled()
    assert state_of(run).word == "cancelled"


def test_another_users_run_is_known_by_the_job_in_its_history(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    """Who holds it is the owner's alone to read."""
    run = recorded_run(tmp_path / "a", REQUEUED)
    hidden = dataclasses.replace(summarize(run), readable=False, claims=(of_job(),))
    fake_slurm["squeue"] = "41|RUNNING|n1|N/A|1:00|gpu|None\n"
    assert run_states([hidden])[0].word == "running"
    fake_slurm["squeue"] = ""
    assert run_states([hidden])[0] == RunState(
        "unknown", "only its owner can see which job or process trains it", "41", job=None
    )


# An array, a het job and free text in the reason, by squeue --array --states=all -o "%i|%T|%N|%S|%l|%P|%r".
LINES = """\
12_0|COMPLETED|n1|2026-11-22T08:00:00|30:00|low|None
12_3|PENDING||2026-11-22T09:00:00|1-00:00:00|low,high|Priority
13+0|RUNNING|n[1-2]|2026-11-22T08:00:00|UNLIMITED|low|None
13+1|RUNNING|n3|2026-11-22T08:00:00|UNLIMITED|low|None
14|PENDING||N/A|30:00|\u00fcber|ReqNodeNotAvail, UnavailableNodes:n[1-2] | sp\u00e4ter
"""


def test_the_jobs_of_arrays_and_het_jobs_are_told_apart() -> None:
    """A het job is known by the id of its first component, too; the reason may contain the separator."""
    jobs = parse_queue(LINES)
    assert sorted(jobs) == ["12_0", "12_3", "13", "13+0", "13+1", "14"]
    assert (jobs["12_0"].live, jobs["12_3"].live) == (False, True)
    assert jobs["13"].nodes == "n[1-2]"
    assert jobs["14"].start is None and jobs["14"].reason.endswith("n[1-2] | sp\u00e4ter")
    assert jobs["12_3"].start is not None and jobs["12_3"].partition == "low,high"


def waiting(reason: str) -> QueuedJob:
    return QueuedJob("41", "PENDING", "", None, "1:00:00", "gpu", reason)


@pytest.mark.parametrize(
    ("reason", "words", "remedy"),
    [
        ("Resources", "next in the queue, waiting for nodes to become free", ""),
        ("PartitionTimeLimit", "requests more time than its partition allows", "--change` with a shorter --time"),
        ("JobHeldUser", "held by its owner", "`scontrol release 41`"),
        (
            "launch failed requeued held",
            "held, because Slurm could not launch the job",
            "`scontrol release 41`. If it happens",
        ),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-2]", "often for maintenance (n[1-2])", "`sinfo -R`"),
        (
            "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
            "down, drained or reserved",
            "`sinfo -R` shows why they are. To start without them, end the job with `scancel 41`",
        ),
        ("QOSMaxGRESPerUser", "a limit of its QOS is reached: GPUs per user (QOSMaxGRESPerUser)", "--qos"),
        ("AssocGrpCpuLimit", "a limit of its account is reached: CPUs in total", "--account"),
        ("QOSMaxJobsPerUserLimit", "running jobs per user", "the job starts when"),
        ("QOSMaxWallDurationPerJobLimit", "requests more than its QOS allows: time per job", "a smaller request"),
        ("AssocGrpCPURunMinutesLimit", "CPU minutes of running jobs", "the job starts when"),
        ("QOSMinGRES", "requests less than its QOS requires: GPUs", "a larger request"),
        (
            "MaxGRESPerAccount",
            "a limit of the cluster is reached: GPUs per account",
            "the job starts when",
        ),
        ("DependencyNeverSatisfied", "the job will never start", "`scancel 41`, then continue"),
        ("SomethingNew", "SomethingNew", ""),
        ("MaxPower", "MaxPower", ""),
    ],
)
def test_a_reason_is_said_in_words_with_a_remedy(reason: str, words: str, remedy: str) -> None:
    """A reason that a later Slurm invents is shown as it is."""
    why = why_waiting(waiting(reason), begun=False)
    assert words in why.words and remedy in why.remedy
    assert "JOB" not in why.remedy


def test_a_remedy_names_the_run() -> None:
    """To be pasted as it is."""
    assert "--run-dir runs/net-0 --change" in why_waiting(waiting("BadConstraints"), False, "runs/net-0").remedy


def test_a_hold_is_told_from_waiting() -> None:
    """Whoever holds the job: nothing starts it before the hold ends."""
    held = ("JobHeldUser", "JobHeldAdmin", "JobHoldMaxRequeue", "launch failed requeued held")
    assert all(is_hold(waiting(reason), begun=False) for reason in held)
    assert not any(is_hold(waiting(reason), begun=False) for reason in ("Priority", "BeginTime", "Dependency"))
    assert is_hold(waiting("BeginTime"), begun=True)


def test_a_controller_that_does_not_answer_is_asked_again_if_there_is_time(
    tmp_path: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `status`, for 20 s; a list of many runs does not wait."""
    fake_slurm["squeue"] = [SlurmUnavailable("no answer"), "41|RUNNING|n1|N/A|1:00|gpu|None\n"]
    summary = summarize(recorded_run(tmp_path / "a", submitted=of_job()))
    assert run_states([summary], patience_s=20)[0].word == "running"
    says(capsys.readouterr().err)
