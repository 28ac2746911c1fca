"""The supervisor's decisions with a fake controller and fake ranks: failures that no cluster has on demand."""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import pytest

from clusterddp import protocol
from clusterddp.errors import RunDirectoryError, SlurmError, SlurmUnavailable, SubmissionForbidden
from clusterddp.failures import exclusion
from clusterddp.failures.exit_status import ExitStatus, launch_failure, of_tasks
from clusterddp.failures.hangs import Hang
from clusterddp.failures.placement import JobStart, Placement
from clusterddp.history.beginnings import Allocated
from clusterddp.history.codec import sentence
from clusterddp.history.ends import Completed
from clusterddp.history.stops import Signal
from clusterddp.history.words import NOT_CONTINUED
from clusterddp.hostlist import expand
from clusterddp.jobdef.job import Job, Limits, Timeouts, Watchdog
from clusterddp.messages import orders
from clusterddp.process import RunningClock, descendants, started_at
from clusterddp.report.booking import book
from clusterddp.rundir import files
from clusterddp.rundir.claims import Claim, JobClaim
from clusterddp.rundir.files import append_line, write_json
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm.commands import JobInfo
from clusterddp.slurm.configuration import Preemption
from clusterddp.slurm.run_states import Cause
from clusterddp.supervisor import controller as monitor
from clusterddp.supervisor import decide, lease, main, recovery
from clusterddp.supervisor.attempt import TICK_S, Attempt
from clusterddp.supervisor.attempt_state import (
    Broadcast,
    ConnectionLost,
    Event,
    Notice,
    PerRank,
    RankEvent,
    Record,
    State,
    Step,
    Stop,
    Timer,
)
from clusterddp.supervisor.control_server import ControlServer
from clusterddp.supervisor.controller import SlurmController, allocated
from clusterddp.supervisor.launcher import SlurmLauncher, srun_command
from clusterddp.supervisor.main import as_started, supervise
from clusterddp.supervisor.retry_limits import exceeded, gpu_hours_end
from clusterddp.training.save_interval import between_interruptions_s
from clusterddp.worker.control_channel import ControlChannel
from tests.fake_slurm import FakeController, FakeRanks, FakeSlurm, RanksHere, next_answer
from tests.histories import event_of, happened, view
from tests.reports import reported
from tests.runs_on_disk import jobs_of, outcome_of
from tests.waiting import wait_until
from tests.wording import says


class Refusing(FakeController):
    """No job can be submitted to it."""

    def resubmit(self, without: Sequence[str] = (), after_this: bool = True) -> str:
        super().resubmit(without, after_this)
        raise SlurmError("sbatch: error: AssocMaxSubmitJobLimit")


JOB = Job(name="x", module="x", gpus_per_node=2, device="cpu")
STOPPED = {"end": "stopped", "step": 7}


@pytest.fixture(autouse=True)
def no_pauses(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    del fake_slurm  # whose pauses are over at once
    monkeypatch.setattr(recovery, "RELAUNCH_S", 0.0)
    monkeypatch.setattr(decide, "HANG_GRACE_S", 0.0)
    yield


def supervised(
    run: RunDirectory, controller: FakeController, end: Mapping[str, Any] = STOPPED, job: Job = JOB
) -> tuple[int, list[str]]:
    """The exit code, and the names of the events."""
    code = Attempt(run, job, run.create_attempt(), FakeRanks(run, end), controller).supervise()
    return code, [event["event"] for event in run.events()]


def test_a_preempted_attempt_is_requeued_and_says_so_once_it_is(run: RunDirectory) -> None:
    """The history reports a requeue only after the controller has accepted it."""
    controller = FakeController(Cause.PREEMPTED)
    assert supervised(run, controller) == (4, ["started", "requeued"])
    assert controller.asked == ["requeue"]


def test_an_attempt_is_recorded_and_ends_while_the_controller_does_not_tell_the_grace_period(run: RunDirectory) -> None:
    """A history that waited for it was empty for minutes, and the nodes of ranks that had finished were held."""
    over, waited = threading.Event(), []

    class Busy(FakeController):
        def term_notice_s(self) -> float | None:
            waited.append(over.wait(20))
            return None

    assert supervised(run, Busy(Cause.PREEMPTED)) == (4, ["started", "requeued"])
    over.set()
    assert waited in ([], [True])


def test_a_disk_that_cannot_be_read_while_an_attempt_ends_delays_the_requeue_alone(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the history said is known by then, and whether a newer attempt exists is asked until there is an answer."""
    monkeypatch.setattr("clusterddp.rundir.records._PAUSES_S", (0.0,))
    errors, real, real_list = [OSError(errno.EIO, "Input/output error")] * 9, files.read_bytes, os.listdir
    ended = threading.Event()

    def read(path: Path) -> bytes:
        if ended.is_set() and path in (run.events_file, run.rank_record(0, 1)):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path)

    def listed(path: Any) -> list[str]:
        if ended.is_set() and errors:
            raise errors.pop()
        return real_list(path)

    class Ranks(FakeRanks):
        def wait(self) -> int:
            ended.set()
            return super().wait()

    monkeypatch.setattr("clusterddp.rundir.records.read_record", read)
    monkeypatch.setattr("os.listdir", listed)
    controller = FakeController(Cause.PREEMPTED)
    assert Attempt(run, JOB, run.create_attempt(), Ranks(run, STOPPED), controller).supervise() == 4
    assert controller.asked == ["requeue"] and not errors
    ended.clear()
    assert [event["event"] for event in run.events()] == ["started", "requeued"]


def test_an_unreachable_controller_is_queried_again_at_the_requeue(run: RunDirectory) -> None:
    """Twice no answer, then one: requeued once, not resubmitted on top."""
    away = SlurmUnavailable("Unable to contact slurm controller")
    controller = FakeController(Cause.PREEMPTED, requeue=[away, away, None])
    assert supervised(run, controller) == (4, ["started", "requeued"])
    assert controller.asked == ["requeue"] * 3


@pytest.mark.parametrize("found", [Cause.PREEMPTED_WITHOUT_GRACE, Cause.REQUEUED])
def test_a_requeue_without_an_answer_that_was_carried_out_is_not_repeated(run: RunDirectory, found: Cause) -> None:
    """The controller's next word is that the job is being requeued: nothing more is asked for, for the same reason."""
    controller = FakeController(*[Cause.PREEMPTED] * 2, found, requeue=[SlurmUnavailable("timed out"), None])
    assert supervised(run, controller) == (3, ["started", "stopped"])
    assert controller.asked == ["requeue"]
    end = run.events()[-1]
    assert (end["cause"], end["then"]) == ("preempted", "requeued by Slurm")


@pytest.mark.parametrize(
    ("notice", "cause"),
    [(Notice(None), "requeued, by `scontrol requeue`"), (Notice(None, Stop.PREEMPTION), "preempted without grace")],
)
def test_a_job_that_outlives_its_grace_is_preempted_and_one_without_an_announcement_is_requeued(
    run: RunDirectory, notice: Notice, cause: str
) -> None:
    """Slurm's record of the job does not tell one from the other. Slurm continues both by itself."""
    attempt = Attempt(run, JOB, run.create_attempt(), FakeRanks(run, STOPPED), FakeController(Cause.REQUEUED))
    attempt.post(notice)
    assert attempt.supervise() == 3
    end = run.events()[-1]
    assert (end["event"], end["then"]) == ("stopped", "requeued by Slurm")
    assert end["cause"].startswith(cause)


def test_a_scancel_just_before_the_requeue_is_respected(run: RunDirectory) -> None:
    """The controller is queried right before the request, not only when the ranks have exited."""
    controller = FakeController(Cause.PREEMPTED, Cause.CANCELLED)
    assert supervised(run, controller) == (1, ["started", "cancelled"])
    assert controller.asked == []


@pytest.mark.parametrize(("policy", "asked"), [(None, "resubmit"), ("requeue", "requeue"), ("resubmit", "resubmit")])
def test_where_preemption_cancels_a_run_continues_in_a_new_job_unless_its_definition_says_otherwise(
    run: RunDirectory, policy: Any, asked: str
) -> None:
    """As `submit` has announced. Within the grace Slurm accepts a requeue, too, and then holds the job."""

    class Cancelling(FakeController):
        def ends_what_it_preempts(self) -> bool:
            return True

    controller = Cancelling(Cause.PREEMPTED)
    supervised(run, controller, job=dataclasses.replace(JOB, policy=policy))
    assert controller.asked == [asked]
    announced = Preemption("low", "CANCEL", 20, 30, 121).sentence(dataclasses.replace(JOB, policy=policy))
    assert ("continues in a new job" in announced) is (asked == "resubmit")


def test_a_refused_requeue_becomes_a_resubmission(run: RunDirectory) -> None:
    """Slurm's reason is in the history."""
    controller = FakeController(Cause.PREEMPTED, requeue=[SlurmError("Requeue is disabled")])
    assert supervised(run, controller) == (4, ["started", "requeue_refused", "resubmitted"])


@pytest.mark.parametrize("cause", [Cause.PREEMPTED, Cause.REQUEUE_REQUESTED])
def test_a_refused_resubmission_becomes_a_requeue(run: RunDirectory, cause: Cause) -> None:
    """Such as at MaxSubmitJobs, as long as the job runs."""
    controller = Refusing(cause)
    job = dataclasses.replace(JOB, policy="resubmit")
    assert supervised(run, controller, job=job) == (4, ["started", "resubmission_refused", "requeued"])
    assert controller.asked == ["resubmit", "requeue"]


def test_where_nodes_may_not_submit_jobs_a_run_tries_it_once(run: RunDirectory) -> None:
    """It then requeues its job, whatever its policy."""

    class Forbidding(FakeController):
        def resubmit(self, without: Sequence[str] = (), after_this: bool = True) -> str:
            super().resubmit(without, after_this)
            raise SubmissionForbidden("sbatch: error: Batch job submission failed: Access/permission denied")

    controller, job = Forbidding(Cause.PREEMPTED), dataclasses.replace(JOB, policy="resubmit")
    kinds = ["started", "resubmission_refused", "requeued"]
    assert supervised(run, controller, job=job) == (4, kinds)
    assert supervised(run, controller, job=job) == (4, [*kinds, "started", "requeued"])
    assert controller.asked == ["resubmit", "requeue", "requeue"]


@pytest.mark.parametrize("cause", [Cause.PREEMPTED, Cause.PREEMPTED_WITHOUT_GRACE])
def test_a_run_that_is_not_to_continue_stops_with_its_job_and_has_no_outcome(run: RunDirectory, cause: Cause) -> None:
    """``continue: false``. Slurm is asked for nothing, and its job ends as leaving a run does."""
    environ, job = {"SLURM_JOB_ID": "41"}, dataclasses.replace(JOB, continues=False)
    controller = FakeController(cause)
    controller.starts_again = SlurmController(environ, run, job).starts_again
    controller.ends_what_it_preempts = SlurmController(environ, run, job).ends_what_it_preempts  # type: ignore[method-assign]
    assert supervised(run, controller, job=job) == (3, ["started", "stopped"])
    assert controller.asked == [] and run.outcome() is None
    assert run.events()[-1]["then"] == NOT_CONTINUED


def test_where_slurm_cancels_what_it_preempts_a_refused_resubmission_becomes_a_requeue_too(run: RunDirectory) -> None:
    """Slurm accepts a requeue within the grace period there."""

    class Cancelling(Refusing):
        def ends_what_it_preempts(self) -> bool:
            return True

    assert supervised(run, Cancelling(Cause.PREEMPTED))[1] == ["started", "resubmission_refused", "requeued"]


def test_a_job_that_can_neither_be_resubmitted_nor_requeued_stops_with_slurms_reason(run: RunDirectory) -> None:
    """`wait --resubmit` submits it later."""
    controller = Refusing(Cause.PREEMPTED, requeue=[SlurmError("Requeue is disabled")])
    _, kinds = supervised(run, controller, job=dataclasses.replace(JOB, policy="resubmit"))
    assert kinds == ["started", "resubmission_refused", "requeue_refused", "stopped"]
    assert "AssocMaxSubmitJobLimit" in run.events()[-1]["refused"]


@pytest.mark.parametrize("cause", [Cause.ENDED_OTHERWISE, Cause.PREEMPTED_WITHOUT_GRACE])
def test_a_job_that_is_ending_is_not_requeued_for_a_refused_resubmission(run: RunDirectory, cause: Cause) -> None:
    """Slurm does with it what it does."""
    controller = Refusing(cause)
    supervised(run, controller, job=dataclasses.replace(JOB, policy="resubmit"))
    assert "requeue" not in controller.asked


def test_an_unreachable_controller_is_queried_until_it_answers(run: RunDirectory) -> None:
    """Nothing is requeued without an answer, and nothing is given up."""
    away = SlurmUnavailable("Unable to contact slurm controller")
    controller = FakeController(away, away, Cause.PREEMPTED)
    assert supervised(run, controller)[1] == ["started", "requeued"]


def test_a_full_disk_does_not_prevent_the_requeue(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The history is not needed for it."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("clusterddp.supervisor.history.append_line", full)
    controller = FakeController(Cause.PREEMPTED)
    assert supervised(run, controller)[0] == 4
    assert controller.asked == ["requeue"]


def test_scancel_ends_the_new_job_even_if_that_has_begun_an_attempt(run: RunDirectory, fake_slurm: FakeSlurm) -> None:
    """After a lost node it starts at once. It trained on although the user had ended the run; now it is cancelled, and
    its supervisor records that."""
    fake_slurm["scancel"] = ""

    class Starting(FakeController):
        def resubmit(self, without: Sequence[str] = (), after_this: bool = True) -> str:
            run.create_attempt()
            return super().resubmit(without, after_this)

    job = dataclasses.replace(JOB, policy="resubmit")
    assert supervised(run, Starting(Cause.PREEMPTED, Cause.CANCELLED), job=job) == (1, ["started"])
    assert (fake_slurm.asked, outcome_of(run)) == (["scancel 42"], None)


def test_a_scancel_of_the_new_job_without_an_answer_is_repeated_and_its_start_finds_the_outcome(
    run: RunDirectory, fake_slurm: FakeSlurm
) -> None:
    """The user had ended the run, and it trained on in the job that nobody had cancelled."""
    tried: list[str] = []

    def scancel(*_: str) -> Exception | None:
        tried.append(str((outcome_of(run) or {}).get("state")))
        return SlurmUnavailable("Socket timed out") if len(tried) == 1 else None

    fake_slurm["scancel"] = scancel
    controller = FakeController(Cause.PREEMPTED, Cause.CANCELLED)
    code, events = supervised(run, controller, job=dataclasses.replace(JOB, policy="resubmit"))
    assert (code, events[-1], tried) == (1, "cancelled", ["cancelled"] * 2)


def test_an_exception_is_shown_even_when_the_job_is_preempted_meanwhile(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """A save that raises at every preemption is not a run without anything to save."""
    raised = {"end": "exception", "error": "ValueError: no", "traceback": "Traceback: no", "used_clusterddp": False}
    assert supervised(run, FakeController(Cause.PREEMPTED), raised)[1] == ["started", "rank_failed", "requeued"]
    says(capsys.readouterr().err)


@pytest.mark.parametrize(("step", "expected"), [(30, 30), (None, 22)])
def test_a_failure_names_the_step_of_the_rank_that_failed(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], step: int | None, expected: int
) -> None:
    """The metrics of rank 0 are behind."""
    append_line(run.metrics_file, {"attempt": 0, "step": 21, "time": 1.0})
    raised = {"end": "exception", "error": "ValueError: no", **({} if step is None else {"step": step})}
    supervised(run, FakeController(), raised)
    assert run.events()[1]["step"] == expected
    says(capsys.readouterr().err)


def test_a_failure_before_the_next_step_is_at_the_step_that_was_resumed(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not at step 0, as it has made none itself: so do failures behind a loop that was already done."""
    resumed = reported(0, "resumed", {"step": 12, "parent": {"attempt": 0, "step": 12}, "inexact": []})
    raised = {"end": "exception", "error": "ValueError: no"}
    attempt = Attempt(run, JOB, run.create_attempt(), FakeRanks(run, raised), FakeController())
    attempt.post(resumed)
    attempt.supervise()
    (failed,) = [event for event in run.events() if event["event"] == "rank_failed"]
    assert failed["step"] == 12
    says(capsys.readouterr().err)


def test_a_killed_ranks_step_is_that_of_the_ranks_that_waited_for_it(run: RunDirectory) -> None:
    """It has no record of its end."""

    class OneKilled(FakeRanks):
        def start(self, command: list[str], environment: Mapping[str, str], logs: Path) -> None:
            super().start(command, environment, logs)
            run.rank_record(int(environment["CLUSTERDDP_ATTEMPT"]), 1).unlink()

    append_line(run.metrics_file, {"attempt": 0, "step": 21, "time": 1.0})
    waited = {
        "end": "exception",
        "error": "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer",
        "step": 30,
    }
    job = dataclasses.replace(JOB, limits=Limits(attempts=1))
    attempt = Attempt(run, job, run.create_attempt(), OneKilled(run, waited), FakeController(Cause.NONE))
    for event in (reported(1, "joined", {"host": "n1"}), ConnectionLost(1)):
        attempt.post(event)
    attempt.supervise()
    failed = run.events()[1]
    assert (failed["event"], failed["rank"], failed["step"]) == ("rank_failed", 1, 30)


def test_a_record_that_a_shared_disk_hides_when_all_ranks_have_exited_is_waited_for(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last report of its rank was lost with its node's connection, and the run failed (seed 40476828)."""

    class TwoNodes(FakeController):
        def describe(self) -> JobStart:
            return JobStart("n1,n2", job="41")

    class OneHidden(FakeRanks):
        def start(self, command: list[str], environment: Mapping[str, str], logs: Path) -> None:
            super().start(command, environment, logs)
            record.rename(hidden)

    number = run.create_attempt()
    record, hidden = run.rank_record(number, 1), run.path / "hidden"
    hides = iter([True])

    def exists(path: Path) -> bool:
        return not next(hides, False) and hidden.rename(record).exists()

    monkeypatch.setattr("clusterddp.supervisor.attempt.exists", exists)
    job = dataclasses.replace(JOB, nodes=2, gpus_per_node=1)
    attempt = Attempt(run, job, number, OneHidden(run, {"end": "done", "step": 7}), TwoNodes(Cause.NONE))
    for rank in range(2):
        attempt.post(reported(rank, "joined", {"host": f"n{rank + 1}"}))
    attempt.post(reported(0, "progress", {"step": 0, "steps": 7}))
    attempt.supervise()
    assert run.events()[-1]["event"] == "completed"


@pytest.mark.parametrize("deciding", [True, False])
def test_an_error_of_the_supervisor_itself_is_no_malformed_report(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, deciding: bool
) -> None:
    """It ends the attempt, after all that was decided is carried out and what ranks have reported is recorded."""
    decided = decide.step

    def step(state: State, event: Event, now: float) -> Step:
        if not (isinstance(event, RankEvent) and isinstance(event.report, Signal)):
            return decided(state, event, now)
        if deciding:
            raise KeyError("ours")
        return state, [Broadcast(orders.Stop("why")), Record(Signal(signal="TERM"))]

    def broken(*_: object, **__: object) -> None:
        raise KeyError("ours")

    monkeypatch.setattr(decide, "step", step)
    monkeypatch.setattr(ControlServer, "broadcast", broken)
    attempt = Attempt(run, JOB, run.create_attempt(), FakeRanks(run, STOPPED), FakeController(Cause.NONE))
    for name, values in (("joined", {"host": "n1"}), ("signal", {"signal": "TERM"}), ("notified", {"reason": "why"})):
        attempt.post(reported(0, name, values))
    with pytest.raises(KeyError, match="ours"):
        attempt.supervise()
    recorded = [event["event"] for event in run.events()]
    assert recorded[-1] == "notified" and ("signal" in recorded) is not deciding


def test_no_timer_runs_while_the_supervisor_is_stopped(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its job is suspended for ten minutes, 10 s after a timer of a minute was started."""
    attempt = Attempt(run, JOB, run.create_attempt(), FakeRanks(run, STOPPED), FakeController(Cause.NONE))

    class Stopped(queue.SimpleQueue[Any]):
        now, suspended = 0.0, False

        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            assert timeout is not None
            self.now += timeout
            if self.now >= 10 and not self.suspended:
                self.suspended, self.now = True, self.now + 600
            raise queue.Empty

    attempt._events = events = Stopped()
    monkeypatch.setattr(time, "monotonic", lambda: events.now)
    attempt._clock = RunningClock(TICK_S)
    attempt._timers = {}
    attempt._start_timer(Timer.STEP, 60.0)
    assert attempt._next_event()[1] is Timer.STEP
    assert 650 <= events.now <= 660


def test_a_plain_crash_does_not_wait_for_an_unreachable_controller(run: RunDirectory) -> None:
    """No rank was told to stop, so no query is needed; the nodes are free at once."""
    raised = {"end": "exception", "error": "ValueError: no"}
    code, events = supervised(run, FakeController(AssertionError("asked")), raised)
    assert (code, events) == (1, ["started", "rank_failed", "failed"])


def test_an_unexplained_end_does_not_end_the_run(run: RunDirectory) -> None:
    """A node failure is no scancel: `wait --resubmit` finds the cause in the history."""
    assert supervised(run, FakeController(Cause.ENDED_OTHERWISE))[1] == ["started", "stopped"]
    assert run.events()[-1]["cause"] == Cause.ENDED_OTHERWISE.value
    assert run.outcome() is None


def test_a_superseded_attempt_writes_nothing_and_requeues_nothing(run: RunDirectory) -> None:
    """A newer attempt started while it was cut off."""
    controller = FakeController(Cause.PREEMPTED)
    number = run.create_attempt()
    attempt = Attempt(run, JOB, number, FakeRanks(run, STOPPED), controller)
    run.create_attempt()
    assert attempt.supervise() == 1
    assert controller.asked == []
    assert "requeued" not in [event["event"] for event in run.events()]


def test_a_supervisor_that_stood_still_while_the_run_was_submitted_again_leaves_it_at_that(run: RunDirectory) -> None:
    """Its node was frozen for longer than its time limit. It would continue a run that the user had ended meanwhile. A
    job that was submitted before this attempt, and never started one, changes nothing."""

    class Frozen(FakeRanks):
        def wait(self) -> int:
            lease.submitted(self._run, "43")
            return super().wait()

    lease.submitted(run, "40")
    controller = FakeController(Cause.TIMED_OUT)
    assert supervised(run, controller)[1] == ["started", "resubmitted"]
    assert Attempt(run, JOB, run.create_attempt(), Frozen(run, STOPPED), controller).supervise() == 3
    assert controller.asked == ["resubmit"]
    assert run.events()[-1]["reason"] == "time limit reached. The run was submitted again as job 43"
    alive = FakeController(Cause.PREEMPTED)  # the other job has ended as it started
    assert Attempt(run, JOB, run.create_attempt(), Frozen(run, STOPPED), alive).supervise() == 4


def test_a_supervisor_that_stood_still_while_its_job_was_restarted_begins_no_attempt(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its node was frozen as it started, so that Slurm restarted the job elsewhere. It superseded the attempt of that
    start, and Slurm ended it then: the run had stopped, and its job had failed."""

    class Restarted(FakeController):
        def __init__(self, restarts: int) -> None:
            super().__init__(Cause.PREEMPTED)
            self.restarts = restarts

        def holder(self) -> JobClaim:
            return dataclasses.replace(super().holder(), restarts=self.restarts)

    assert supervise(run, JOB, lambda *_: FakeRanks(run, STOPPED), Restarted(1)) == 4
    assert supervise(run, JOB, lambda *_: FakeRanks(run, STOPPED), Restarted(0)) == 1
    assert run.attempts() == [0]
    says(capsys.readouterr().err)
    assert supervise(run, JOB, lambda *_: FakeRanks(run, STOPPED), Restarted(2)) == 4
    assert run.attempts() == [0, 1]
    environ = {"SLURM_JOB_ID": "41", "SLURM_RESTART_COUNT": "3"}
    assert SlurmController(environ, run, JOB).holder() == JobClaim("41", restarts=3)


def test_a_failed_run_is_not_trained_again_by_a_requeue_of_its_own_job(run: RunDirectory) -> None:
    """24.11 requeues a job once more after a requeue within a grace; another job may continue it."""
    raised = {"end": "exception", "error": "ValueError: no"}
    ranks, controller = FakeRanks(run, raised), FakeController(Cause.NONE)
    assert supervise(run, JOB, lambda *_: ranks, controller) == 1
    assert supervise(run, JOB, lambda *_: ranks, controller) == 1
    assert run.attempts() == [0]


def test_a_start_while_the_controller_is_busy_asks_again_who_holds_the_run(
    run: RunDirectory, fake_slurm: FakeSlurm
) -> None:
    """With an error the job, and with it the run, would end: nothing continues a run whose job has FAILED."""
    lease.take(run, run.create_attempt(), lease.of_job("40"))
    fake_slurm["scontrol show job"] = [SlurmUnavailable("Socket timed out on send/recv operation"), None]
    ranks = FakeRanks(run, {"end": "done", "used_clusterddp": True})
    assert supervise(run, JOB, lambda *_: ranks, FakeController(Cause.NONE)) == 0
    assert (outcome_of(run) or {})["state"] == "completed"


def test_a_run_that_completes_while_another_job_starts_is_not_trained_again(
    run: RunDirectory, fake_slurm: FakeSlurm
) -> None:
    """The controller takes seconds to say that the first job has ended; its outcome stays."""
    lease.take(run, run.create_attempt(), lease.of_job("40"))
    outcome = {"state": "completed", "step": 9, "attempts": 1, "reason": "all ranks finished"}
    fake_slurm["scontrol show job"] = lambda *_: write_json(run.outcome_file, outcome)
    ranks = FakeRanks(run, {"end": "done", "used_clusterddp": True})
    assert supervise(run, JOB, lambda *_: ranks, FakeController(Cause.NONE)) == 0
    assert run.attempts() == [0]
    assert outcome_of(run) == outcome


def test_an_outcome_that_is_written_while_a_start_stands_still_is_kept(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node was frozen between its look at the outcome and its attempt, and it removed that of a completed run."""
    real = RunDirectory.create_attempt

    def create_attempt(run: RunDirectory) -> int:
        write_json(run.outcome_file, {"state": "completed", "step": 9, "attempts": 1, "reason": "all ranks finished"})
        return real(run)

    monkeypatch.setattr(RunDirectory, "create_attempt", create_attempt)
    assert supervise(run, JOB, lambda *_: FakeRanks(run, STOPPED), FakeController(Cause.NONE)) == 0
    assert (outcome_of(run) or {})["state"] == "completed"


def test_a_failure_in_the_jobs_restart_while_its_first_start_stands_still_is_kept(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The restart had failed the run. The start took its own attempt for the last one, and removed the outcome."""
    real = RunDirectory.create_attempt

    def create_attempt(run: RunDirectory) -> int:
        lease.take(run, real(run), dataclasses.replace(FakeController().holder(), restarts=1))
        write_json(run.outcome_file, {"state": "failed", "step": 0, "attempts": 1, "reason": "ValueError"})
        return real(run)

    monkeypatch.setattr(RunDirectory, "create_attempt", create_attempt)
    assert supervise(run, JOB, lambda *_: FakeRanks(run, STOPPED), FakeController(Cause.NONE)) == 1
    assert (outcome_of(run) or {})["state"] == "failed"


def test_an_outcome_that_is_written_while_a_start_looks_at_the_last_one_is_kept(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node froze between two looks, and it removed the outcome of the job that had completed the run, which then
    seemed to be stopped."""
    real = lease.held_before

    def held_before(run: RunDirectory, attempt: int, me: Claim) -> bool:
        write_json(run.outcome_file, {"state": "completed", "step": 9, "attempts": 1, "reason": "all ranks finished"})
        return real(run, attempt, me)

    monkeypatch.setattr(lease, "held_before", held_before)
    supervise(run, JOB, lambda *_: FakeRanks(run, STOPPED), FakeController(Cause.PREEMPTED))
    assert (outcome_of(run) or {})["state"] == "completed"


def test_ranks_that_are_killed_repeatedly_are_started_three_times_without_a_checkpoint(run: RunDirectory) -> None:
    """Each start is an attempt of its own in the same job; then the run has failed, and says why."""
    killed = FakeRanks(run, {"end": "died", "error": "killed"})
    assert supervise(run, JOB, lambda *_: killed, FakeController(Cause.NONE)) == 1
    names = [event["event"] for event in run.events() if event["event"] != "not_excluded"]
    assert names == ["started", "rank_failed", "restarted"] * 2 + ["started", "rank_failed", "failed"]
    assert "3 consecutive attempts failed without saving a new checkpoint" in (outcome_of(run) or {})["reason"]


def test_ranks_that_save_between_two_failures_may_fail_more_often(run: RunDirectory) -> None:
    """Only failures without progress count."""
    ends = iter([{"end": "died", "error": "killed"}] * 5 + [{"end": "done"}])

    def ranks(*_: object) -> FakeRanks:
        if before := run.newest_attempt():
            happened(run, {"time": 1.0, "attempt": before, "event": "checkpoint", "step": 1})
            (run.checkpoints / f"step-000000000001.attempt-{before}.safetensors").touch()
        return FakeRanks(run, next(ends))

    assert supervise(run, JOB, ranks, FakeController(Cause.NONE)) == 0
    assert outcome_of(run) == {"state": "completed", "step": 1, "attempts": 6, "reason": "all ranks finished"}


def test_an_attempt_deletes_the_logs_of_old_ones(run: RunDirectory) -> None:
    """Its own and the first attempt's stay, and the numbers of all."""
    ends = iter([{"end": "died", "error": "killed"}] * 2 + [{"end": "done"}])
    job = dataclasses.replace(JOB, keep_logs=1)
    assert supervise(run, job, lambda *_: FakeRanks(run, next(ends)), FakeController(Cause.NONE)) == 0
    wait_until(lambda: not run.attempt_logs(1).exists(), "the logs of attempt 1 to be deleted")
    assert run.attempt_logs(0).exists() and run.attempt_logs(2).exists() and run.attempts() == [0, 1, 2]


# ---- nodes that fail


def test_a_node_that_failed_twice_is_excluded_from_the_next_job(run: RunDirectory) -> None:
    """Restarted in place once; then the run continues in a new job, and status has a text for the administrator."""
    killed = FakeRanks(run, {"end": "died", "error": "killed by signal 9"})
    controller = FakeController(Cause.NONE)
    controller.nodes = ["n1", "n2", "n3"]
    assert supervise(run, JOB, lambda *_: killed, controller) == 4
    names = [event["event"] for event in run.events()]
    assert names == [
        *("started", "rank_failed", "restarted"), *("started", "rank_failed", "excluded", "resubmitted"),
    ]  # fmt: skip
    assert controller.asked == ["resubmit n1"]


@pytest.mark.parametrize(
    ("hosts", "rank", "node"),
    [
        ({}, 1, "n1"),
        ({}, 2, "n2"),  # ranks of two GPUs each: two on a node, not four
        ({2: "n2.example.org"}, 2, "n2"),
        ({1: "n2"}, 1, "n2"),  # srun was told another distribution
    ],
)
def test_a_rank_is_looked_for_on_its_own_node(hosts: dict[int, str], rank: int, node: str) -> None:
    """That node is recorded as faulty and excluded."""
    job = dataclasses.replace(JOB, nodes=2, gpus_per_node=4, gpus_per_rank=2)
    assert State(job, nodes=("n1", "n2"), hosts=PerRank(hosts)).node_of(rank) == node


def test_a_bad_node_is_excluded_where_fewer_suffice(run: RunDirectory) -> None:
    """A run that started on two of ``nodes: 1-2`` continues with one."""
    killed = FakeRanks(run, {"end": "died", "error": "killed by signal 9"})
    controller = FakeController(Cause.NONE)
    controller.nodes = ["n1", "n2"]
    job = as_started(dataclasses.replace(JOB, nodes=2, min_nodes=1, gpus_per_node=1), {"SLURM_JOB_NUM_NODES": "2"})
    assert supervise(run, job, lambda *_: killed, controller) == 4
    assert controller.asked == ["resubmit n1"]


def test_where_too_few_nodes_would_remain_slurms_choice_is_kept_and_reported(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run continues in place."""
    killed = FakeRanks(run, {"end": "died", "error": "killed by signal 9"})
    controller = FakeController(Cause.NONE)
    assert supervise(run, JOB, lambda *_: killed, controller) == 1
    assert controller.asked == []
    said = capsys.readouterr().out
    words = "no further node is excluded, because without n1 the partition has 0 usable nodes, but the run needs 1"
    assert f"attempt 1: {words}" in said


class Killed(FakeRanks):
    """Ranks that are killed, the second one first, and leave no record."""

    def start(self, command: list[str], environment: Mapping[str, str], logs: Path) -> None: ...

    def exit_statuses(self) -> Mapping[int, ExitStatus]:
        return {1: ExitStatus(signal=9), 0: ExitStatus(signal=9)}


def test_only_a_rank_that_its_launcher_did_not_kill_is_told_to_check_its_memory(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first that ended; the other one was killed for it."""
    supervise(run, JOB, lambda *_: Killed(run, {"end": "died"}), FakeController(Cause.NONE))
    shown = capsys.readouterr().err
    says(shown)


TIMEOUT = (
    "DistBackendError: [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)"
)


@pytest.mark.parametrize(
    ("error", "stopped_s", "named"), [(TIMEOUT, 2000.0, True), (TIMEOUT, 900.0, False), ("OSError: x", 2000.0, False)]
)
def test_a_timeout_of_collectives_that_ran_while_the_job_was_suspended_is_named(
    run: RunDirectory, error: str, stopped_s: float, named: bool
) -> None:
    """NCCL's and gloo's clocks go on. Longer than timeouts.step_s, 1800 s; the restart comes in any case."""

    class Resumed(FakeRanks):
        def wait(self) -> int:
            attempt.post(reported(0, "joined", {"host": "n1"}))
            beat = {"count": 5, "step": 4, "age_s": 0.0, "allowed_s": 600.0, "stood_s": stopped_s}
            attempt.post(reported(0, "alive", beat))
            return super().wait()

    ranks = Resumed(run, {"end": "exception", "error": error, "traceback": "", "step": 4})
    attempt = Attempt(run, JOB, run.create_attempt(), ranks, FakeController(Cause.NONE))
    attempt.supervise()
    (failed,) = [event for event in run.events() if event["event"] == "rank_failed"]
    words = "the ranks had been stopped for 2000 s, for example by scontrol suspend, and that time counts"
    assert (words in failed["error"]) is named, failed


class Cut(FakeRanks):
    """Each rank on a node of its own. All but the first's do not answer, one noticed after the other, the later ones
    when the first rank is being ended. To be told the attempt before the start."""

    attempt: Attempt
    nodes: int

    def start(self, command: list[str], environment: Mapping[str, str], logs: Path) -> None:
        self._abandoned = threading.Event()

    def abandon(self) -> None:
        self._abandoned.set()

    def wait(self) -> int:
        for rank in range(self.nodes):
            self.attempt.post(reported(rank, "joined", {"host": f"n{rank + 1}"}))
        for rank in range(1, self.nodes):
            self.attempt.post(ConnectionLost(rank, silent=True))
            assert self._abandoned.wait(10)
        return 137


def cut(
    run: RunDirectory,
    controller: FakeController,
    nodes: int = 2,
    nodelist: str | None = None,
    kind: type[Cut] = Cut,
) -> int:
    """The exit code of an attempt that loses all nodes but its first."""
    number = run.create_attempt()
    lease.take(run, number, controller.holder())
    ranks = kind(run, {"end": "died"})
    controller.describe = lambda: JobStart(f"n[1-{nodes}]", job="41")  # type: ignore[method-assign]
    controller.dead = [f"n{number + 1}" for number in range(1, nodes)]
    job = dataclasses.replace(JOB, nodes=nodes, gpus_per_node=1, nodelist=nodelist)
    ranks.attempt, ranks.nodes = Attempt(run, job, number, ranks, controller), nodes
    return ranks.attempt.supervise()


def test_a_node_that_does_not_answer_is_lost_and_the_run_continues_without_it(run: RunDirectory) -> None:
    """The other ranks are told to exit, srun is not waited for, and the job no longer holds the run."""
    controller = FakeController(Cause.NONE)
    controller.nodes = ["n1", "n2", "n3"]
    assert cut(run, controller) == 4
    assert [event["event"] for event in run.events()] == ["started", "node_lost", "rank_failed", "resubmitted"]
    assert run.events()[2]["error"] == "was lost because node n2 no longer responds"
    assert controller.asked == ["resubmit n2"]
    assert lease.holders(run) == []


def test_the_next_job_waits_for_a_lost_node_that_nodelist_requires(run: RunDirectory) -> None:
    """Slurm would refuse a job that requires and excludes the node, and the run would stop."""
    controller = FakeController(Cause.NONE)
    controller.nodes = ["n1", "n3"]
    assert cut(run, controller, nodelist="n[1-2]") == 4
    names = [event["event"] for event in run.events()]
    assert names == ["started", "node_lost", "rank_failed", "not_excluded", "resubmitted"]
    assert run.events()[3]["reason"] == "nodelist requires n2"
    assert controller.asked == ["resubmit"]


def test_a_run_continues_after_a_lost_node_once_the_disk_answers(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk error while the job released the run had ended the supervisor before it submitted the next job (seed
    30005019)."""
    real, errors = lease.let_go, [OSError(errno.EIO, "Input/output error", "submitted.json"), None]

    def let_go(run: RunDirectory, attempt: int) -> None:
        if error := errors.pop(0):
            raise error
        real(run, attempt)

    monkeypatch.setattr(lease, "let_go", let_go)
    controller = FakeController(Cause.NONE)
    controller.nodes = ["n1", "n2", "n3"]
    assert cut(run, controller) == 4
    assert controller.asked == ["resubmit n2"] and lease.holders(run) == []


def test_a_run_whose_ranks_finish_while_a_node_does_not_respond_has_completed(run: RunDirectory) -> None:
    """Their records say so. The exit code is that of srun, which was ended for the node: the run had failed, "all ranks
    finished, but the launcher exited with code 137"."""

    class Finishing(Cut):
        def wait(self) -> int:
            code = super().wait()
            for rank in range(2):
                write_json(run.rank_record(0, rank), {"host": f"n{rank + 1}", "used_clusterddp": True, "end": "done"})
            append_line(run.metrics_file, {"step": 9, "attempt": 0})
            return code

    assert cut(run, FakeController(Cause.NONE), kind=Finishing) == 0
    outcome = outcome_of(run) or {}
    assert (outcome["state"], outcome["step"]) == ("completed", 10)


def test_two_nodes_that_are_lost_at_once_are_both_recorded_and_excluded(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second is noticed while the ranks are being ended for the first; one more failure and either stays out."""
    controller = FakeController(Cause.NONE)
    controller.nodes = ["n1", "n2", "n3", "n4", "n5"]
    assert cut(run, controller, nodes=3) == 4
    assert [event["node"] for event in run.events() if event["event"] == "node_lost"] == ["n2", "n3"]
    assert controller.asked == ["resubmit n2 n3"]
    says(capsys.readouterr().err)
    again = {"event": "rank_failed", "attempt": 1, "time": time.time(), "suspect": "n3", "error": "killed by signal 9"}
    happened(run, again)
    assert exclusion.failed(run.history(), time.time()) == ["n3"]


class Rebooted(FakeRanks):
    """Two ranks, each on a node of its own. The second one's connection is closed, and the first one is dismissed. To
    be told the attempt before the start."""

    attempt: Attempt
    statuses: Mapping[int, ExitStatus] = {}

    def start(self, command: list[str], environment: Mapping[str, str], logs: Path) -> None: ...

    def wait(self) -> int:
        for rank in range(2):
            self.attempt.post(reported(rank, "joined", {"host": f"n{rank + 1}"}))
        self.attempt.post(ConnectionLost(1))
        self.attempt.post(reported(0, "left", {"host": "n1", "end": "dismissed", "error": "rank 1 exited"}))
        return 1

    def exit_statuses(self) -> Mapping[int, ExitStatus]:
        return self.statuses


def rebooted(
    run: RunDirectory,
    controller: FakeController,
    statuses: Mapping[int, ExitStatus] | None = None,
    kind: type[Rebooted] = Rebooted,
    **changes: Any,
) -> int:
    """The exit code of an attempt, in which the connection to the rank on n2 is closed."""
    number = run.create_attempt()
    lease.take(run, number, controller.holder())
    nodes = "n[1-3]" if "spare_nodes" in changes else "n[1-2]"
    controller.describe = lambda: JobStart(nodes, job="41")  # type: ignore[method-assign]
    controller.nodes = ["n1", "n2", "n3"]
    job = dataclasses.replace(JOB, nodes=2, gpus_per_node=1, **changes)
    placement = Placement(("n1", "n2", "n3"), ("n1", "n2")) if "spare_nodes" in changes else None
    ranks = kind(run, {"end": "died"})
    ranks.statuses = statuses or {}
    ranks.attempt = Attempt(run, job, number, ranks, controller, placement=placement)
    ranks.attempt.post(controller.notice())
    return ranks.attempt.supervise()


def test_a_node_that_closed_its_connections_and_does_not_answer_is_lost(run: RunDirectory) -> None:
    """As after a reboot. All ranks had restarted there, and srun had waited for the node until Slurm gave it up."""
    controller = FakeController(Cause.NONE)
    controller.dead = ["n2"]
    assert rebooted(run, controller) == 4
    assert [event["event"] for event in run.events()] == ["started", "rank_failed", "node_lost", "resubmitted"]
    failed, lost = run.events()[1:3]
    assert (failed["rank"], failed["error"]) == (1, "was lost because node n2 no longer responds")
    assert (lost["node"], lost["suspect"]) == ("n2", "n2")
    assert controller.asked == ["resubmit n2"] and controller.connected_to == ["n2"]


def test_a_node_that_is_rebooted_just_after_its_ranks_have_finished_does_not_fail_the_run(run: RunDirectory) -> None:
    """srun exits with code 1, because it does not learn how they ended (seed 20091232)."""

    class Finished(Rebooted):
        def wait(self) -> int:
            for rank in range(2):
                left = {"host": f"n{rank + 1}", "end": "done", "used_clusterddp": True}
                self.attempt.post(reported(rank, "joined", {"host": f"n{rank + 1}"}))
                self.attempt.post(reported(rank, "left", left))
            return 1

    controller = FakeController(Cause.NONE)
    controller.dead = ["n2"]
    assert rebooted(run, controller, kind=Finished) == 0
    assert run.events()[-1]["event"] == "completed"


def test_ranks_leave_a_node_that_does_not_answer_for_a_spare_one(run: RunDirectory) -> None:
    """In the same job, without an attempt in between."""
    controller = FakeController(Cause.NONE)
    controller.dead = ["n2"]
    assert rebooted(run, controller, spare_nodes=1) == recovery.RESTART
    (moved,) = [event for event in run.events() if event["event"] == "moved"]
    assert (moved["nodes"], moved["aside"]) == (["n1", "n3"], ["n2"])


@pytest.mark.parametrize(("moved", "known"), [(True, "8"), (False, None)])
def test_ranks_that_move_to_other_nodes_are_given_the_step_of_the_last_checkpoint(
    run: RunDirectory, moved: bool, known: str | None
) -> None:
    """A shared disk may hide it from them (seed 50185460)."""
    number, given = run.create_attempt(), dict[str, str]()
    events = [{"event": "checkpoint", "step": step} for step in (4, 8)] + [{"event": "moved"}] * moved
    for event in events:
        happened(run, {**event, "attempt": number, "time": 1.0})

    class Told(FakeRanks):
        def start(self, command: list[str], environment: Mapping[str, str], logs: Path) -> None:
            super().start(command, environment, logs)
            given.update(environment)

    Attempt(run, JOB, run.create_attempt(), Told(run, {"end": "done"}), FakeController(Cause.NONE)).supervise()
    assert given.get(protocol.COMMITTED) == known


@pytest.mark.parametrize("error", [None, SlurmUnavailable("Unable to contact slurm controller")])
def test_ranks_restart_on_a_node_that_answers_or_whose_address_is_unknown(
    run: RunDirectory, error: Exception | None
) -> None:
    """Only the rank's process has ended."""

    class Asked(FakeController):
        def unanswering(self, nodes: Sequence[str]) -> Sequence[str]:
            assert nodes == ["n2"]
            return next_answer([error or ()])  # type: ignore[no-any-return]

    assert rebooted(run, Asked(Cause.NONE)) == recovery.RESTART
    assert [event["event"] for event in run.events()] == ["started", "rank_failed", "restarted"]


@pytest.mark.parametrize("notice", [Notice(None), Notice(None, Stop.PREEMPTION)], ids=["exit status", "preemption"])
def test_a_node_is_not_asked_about_a_rank_that_was_killed_or_in_a_job_that_ends(
    run: RunDirectory, notice: Notice
) -> None:
    """srun reports an exit status only while the node lives."""
    controller = FakeController(Cause.NONE if notice.stop is None else Cause.PREEMPTED)
    controller.dead = ["n2"]
    controller.notice = lambda: notice  # type: ignore[method-assign]
    rebooted(run, controller, {1: ExitStatus(signal=9)} if notice.stop is None else {})
    assert controller.connected_to == []
    assert "node_lost" not in [event["event"] for event in run.events()]


def test_ranks_leave_a_node_that_slurm_took_out_of_the_job_before_they_had_started_there(run: RunDirectory) -> None:
    """Seen on 22.05.8 after the processes of n2 had ended: srun waited for n2, and then failed with "Requested node
    configuration is not available". Three attempts failed on n2 within a second, n1 was blamed, and the run failed."""
    nodes, asked = {"n1", "n2", "n3"}, threading.Event()

    class Losing(FakeController):
        def describe(self) -> JobStart:
            return JobStart("n[1-3]", job="41")

        def notice(self) -> Notice:
            asked.set()
            return Notice(None, nodes=frozenset(nodes))

    class NotCreated(FakeRanks):
        def start(self, command: list[str], environment: Mapping[str, str], logs: Path) -> None: ...

        def wait(self) -> int:
            assert asked.wait(20)  # the monitor's first question
            nodes.discard("n2")
            return super().wait()

    job = dataclasses.replace(JOB, nodes=2, gpus_per_node=1, spare_nodes=1)
    first, then = NotCreated(run, {"end": "died"}), FakeRanks(run, {"end": "done"})
    controller = Losing(Cause.NONE)
    controller.nodes = ["n1", "n3"]
    assert supervise(run, job, lambda *_: first if run.newest_attempt() == 0 else then, controller) == 0
    events = [event for event in run.events() if event["event"] in ("started", "rank_failed", "node_lost", "moved")]
    assert [event["event"] for event in events] == ["started", "rank_failed", "node_lost", "moved", "started"]
    assert (events[1]["rank"], events[1]["suspect"]) == (1, "n2")
    assert (events[3]["nodes"], events[3]["aside"]) == (["n1", "n3"], ["n2"])


@pytest.mark.parametrize("status", [ExitStatus(not_started="Communication connection failure"), None])
def test_a_run_leaves_a_job_that_had_lost_too_many_nodes_before_its_first_attempt(
    run: RunDirectory, status: ExitStatus | None
) -> None:
    """Whether srun refuses the step or cannot start its tasks. Three attempts had failed, and with them the run
    (seed 20056324)."""

    class NotStarted(FakeRanks):
        def start(self, command: list[str], environment: Mapping[str, str], logs: Path) -> None: ...

        def exit_statuses(self) -> Mapping[int, ExitStatus]:
            return {0: status, 1: status} if status else {}

    controller, number = FakeController(Cause.NONE), run.create_attempt()
    controller.nodes = ["n1", "n2", "n3"]
    job = dataclasses.replace(JOB, nodes=2, gpus_per_node=1, spare_nodes=1)
    ranks, placement = NotStarted(run, {"end": "died"}), Placement(("n1",), ("n1",))
    assert Attempt(run, job, number, ranks, controller, placement=placement).supervise() == 4
    assert controller.asked == ["resubmit"]
    assert "left, but the run needs 2" in run.events()[-1]["reason"]


def test_a_run_that_gets_no_new_job_after_a_lost_node_is_not_without_a_holder(run: RunDirectory) -> None:
    """`wait --resubmit` queries that job, whose state tells what happened, and no other job trains meanwhile."""
    controller = Refusing(Cause.NONE)
    controller.nodes = ["n1", "n2"]
    assert cut(run, controller) == 3
    assert run.events()[-1]["reason"].endswith("Could not resubmit the run: sbatch: error: AssocMaxSubmitJobLimit")
    assert run.events()[-1]["refused"] == "sbatch: error: AssocMaxSubmitJobLimit"
    assert lease.holders(run) == [controller.holder()]


def test_a_users_own_allocation_that_loses_a_node_is_released_and_nothing_is_submitted(run: RunDirectory) -> None:
    """Its owner continues the run."""
    controller = FakeController(Cause.NONE)
    controller.nodes, controller.starts_again = ["n1", "n2"], False
    assert cut(run, controller) == 3
    assert controller.asked == []
    assert run.events()[-1]["event"] == "stopped"


def test_a_run_that_gets_no_new_job_without_a_bad_node_continues_in_place(run: RunDirectory) -> None:
    """The node is then not excluded, which is reported."""
    killed = FakeRanks(run, {"end": "died", "error": "killed by signal 9"})
    controller = Refusing(Cause.NONE)
    controller.nodes = ["n1", "n2"]
    assert supervise(run, JOB, lambda *_: killed, controller) == 1
    names = [event["event"] for event in run.events()]
    assert names[3:] == [
        *("started", "rank_failed", "excluded", "not_excluded", "restarted"), *("started", "rank_failed", "failed"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("queued", "then", "submissions", "end"),
    [
        ("44", Cause.PREEMPTED, 1, ("resubmitted", "44")),
        (None, Cause.PREEMPTED, 2, ("resubmitted", "45")),
        (None, Cause.CANCELLED, 1, ("cancelled", None)),
    ],
)
def test_a_submission_without_an_answer_is_looked_for_before_another_one_is_made(
    run: RunDirectory,
    fake_slurm: FakeSlurm,
    queued: str | None,
    then: Cause,
    submissions: int,
    end: tuple[str, str | None],
) -> None:
    """Slurm may have carried it out: that job trained on after `clusterddp stop`, and no file named it. This job,
    which is in the queue, too, is no successor. One that was cancelled meanwhile submits no other."""
    fake_slurm |= {"scontrol": "", "sbatch": [SlurmUnavailable("Socket timed out"), "45\n"]}
    fake_slurm["squeue"] = "".join(f"{job}|{run.batch_script}\n" for job in ("41", queued) if job)
    run.batch_script.write_text("#!/bin/sh\n")
    real = SlurmController({"SLURM_JOB_ID": "41"}, run, JOB)
    controller = FakeController(Cause.PREEMPTED, then)
    controller.resubmit, controller.successor = real.resubmit, real.successor  # type: ignore[method-assign]
    supervised(run, controller, job=dataclasses.replace(JOB, policy="resubmit"))
    ended = run.events()[-1]
    assert (ended["event"], ended.get("job"), fake_slurm.count("sbatch")) == (*end, submissions)
    assert jobs_of(lease.holders(run)) == [job for job in (end[1],) if job]


@pytest.mark.parametrize(
    ("steps", "waits"),
    [
        ([(700, "PENDING"), (444, "RUNNING")], False),
        ([(444, "RUNNING"), (444, "PENDING")], False),  # srun had asked twice
        ([(700, "RUNNING"), (444, "PENDING")], True),
        ([(700, "PENDING"), (445, "PENDING")], True),  # a site's srun is a script
        ([(700, "PENDING")], None),  # slurmctld has restarted since srun asked it
        ([], None),
    ],
)
def test_whether_srun_waits_is_unknown_until_slurm_knows_it(
    run: RunDirectory,
    fake_slurm: FakeSlurm,
    monkeypatch: pytest.MonkeyPatch,
    steps: list[tuple[int, str]],
    waits: bool | None,
) -> None:
    """Then the supervisor asks again: an srun that is taken for started would be waited for without bound."""
    fake_slurm["scontrol show step"] = "".join(f"State={state} SrunHost:Pid=n1:{pid}\n" for pid, state in steps)
    monkeypatch.setattr(monitor, "descendants", lambda pid: {445: "srun"} if pid == 444 else {})
    assert SlurmController({"SLURM_JOB_ID": "41"}, run, JOB).waits_for_nodes(444) is waits


def test_no_second_job_is_submitted_once_the_run_has_begun_another_attempt(
    run: RunDirectory, fake_slurm: FakeSlurm
) -> None:
    """After a lost node the run is free while its next job is submitted, and its user may be faster."""

    def sbatch(*_: str) -> Exception:
        run.create_attempt()
        return SlurmUnavailable("Socket timed out")

    fake_slurm |= {"scontrol": "", "sbatch": sbatch, "squeue": f"41|{run.batch_script}\n"}
    run.batch_script.write_text("#!/bin/sh\n")
    real = SlurmController({"SLURM_JOB_ID": "41"}, run, JOB)
    controller = FakeController(Cause.PREEMPTED, Cause.PREEMPTED)
    controller.resubmit, controller.successor = real.resubmit, real.successor  # type: ignore[method-assign]
    supervised(run, controller, job=dataclasses.replace(JOB, policy="resubmit"))
    assert fake_slurm.count("sbatch") == 1
    assert not [event for event in run.events() if event["event"] in ("resubmitted", "cancelled")]


def test_a_new_job_is_recorded_once_the_disk_answers(
    run: RunDirectory, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else no file would name the job that continues the run, and the supervisor would end with this error."""
    real, errors = lease.submitted, [OSError(errno.EIO, "Input/output error"), None]

    def submitted(run: RunDirectory, job_id: str) -> None:
        if error := errors.pop(0):
            raise error
        real(run, job_id)

    monkeypatch.setattr(lease, "submitted", submitted)
    fake_slurm |= {"scontrol": "", "sbatch": "42\n"}
    run.batch_script.write_text("#!/bin/sh\n")
    assert SlurmController({"SLURM_JOB_ID": "41"}, run, JOB).resubmit() == "42"
    assert jobs_of(lease.holders(run))[0] == "42"


def test_a_job_that_gets_no_successor_may_be_requeued_again(run: RunDirectory, fake_slurm: FakeSlurm) -> None:
    """Without grace only Slurm itself starts it again after a preemption."""
    fake_slurm |= {"scontrol": "", "sbatch": SlurmError("AssocMaxSubmitJobLimit")}
    run.batch_script.write_text("#!/bin/sh\n")
    with pytest.raises(SlurmError):
        SlurmController({"SLURM_JOB_ID": "41"}, run, JOB).resubmit()
    assert [line.split()[0 if "sbatch" in line else -1] for line in fake_slurm.asked] == [
        "Requeue=0",
        "sbatch",
        "Requeue=1",
    ]


@pytest.mark.parametrize(
    ("expedite", "state", "asked"),
    [(True, "RUNNING", ["41", "Requeue=0"]), (True, "COMPLETING", ["41"]), (False, "RUNNING", [])],
    ids=["running", "being requeued", "ordinary"],
)
@pytest.mark.parametrize("raises", [False, True])
def test_a_job_that_would_be_requeued_for_its_exit_code_is_not_as_a_run_fails(
    run: RunDirectory,
    fake_slurm: FakeSlurm,
    monkeypatch: pytest.MonkeyPatch,
    expedite: bool,
    state: str,
    asked: list[str],
    raises: bool,
) -> None:
    """Slurm then holds a job with --requeue=expedite. After exit code 0 it does not."""
    fake_slurm |= {"scontrol update": "", "scontrol show job": JobInfo("41", state, "None", "n1", 0, None, None)}

    def supervise_one(*_: object) -> int:
        if raises:
            raise RunDirectoryError("no disk")
        return code

    monkeypatch.setattr(main, "supervise_one", supervise_one)
    job = dataclasses.replace(JOB, expedite_requeue=expedite)
    controller = SlurmController({"SLURM_JOB_ID": "41"}, run, job)
    code = 1
    with pytest.raises(RunDirectoryError) if raises else nullcontext():
        assert main.supervise(run, job, lambda *_: None, controller) == code  # type: ignore[arg-type]
    assert [line.split()[-1] for line in fake_slurm.asked] == asked
    code = 0
    if not raises:
        main.supervise(run, job, lambda *_: None, controller)  # type: ignore[arg-type]
        assert len(fake_slurm.asked) == len(asked)


def test_a_script_that_saved_nothing_since_it_resumed_continues_from_the_same_file(run: RunDirectory) -> None:
    """Its own. The history had named no checkpoint."""
    number = run.create_attempt()
    happened(run, {"attempt": number, "time": 1.0, "event": "own_resume", "file": "a.pt"})
    happened(run, {"attempt": number, "time": 2.0, "event": "steps_seen"})
    Attempt(run, JOB, number, FakeRanks(run, STOPPED), FakeController(Cause.PREEMPTED)).supervise()
    assert "The newest checkpoint is a.pt. The job is requeued" in (sentence(event_of(run.events()[-1])) or "")


@pytest.mark.parametrize(
    ("submitted_at", "recorded", "code"),
    [(90.0, False, 0), (110.0, False, None), (90.0, True, None), (None, False, None)],
)
def test_a_job_queued_before_the_user_stopped_the_run_does_not_continue_it(
    run: RunDirectory, fake_slurm: FakeSlurm, submitted_at: float | None, recorded: bool, code: int | None
) -> None:
    """A supervisor submitted it and was killed before it recorded that (seed 20392991). A user's job continues it."""
    lease.take(run, run.create_attempt(), lease.of_job("41"))
    happened(run, {"attempt": 0, "time": 100.0, "event": "requested", "request": "stop"})
    if recorded:
        lease.submitted(run, "42")
    fake_slurm["scontrol"] = JobInfo("42", "RUNNING", "None", "n1", 0, None, None, submit_time=submitted_at)
    assert main.finished(run, SlurmController({"SLURM_JOB_ID": "42"}, run, JOB), None) == code


@pytest.mark.parametrize(
    ("cause", "nodes", "without"),
    [
        (Cause.PREEMPTED, ["n1", "n7"], " n7"),
        (Cause.PREEMPTED, ["n7"], ""),
        (Cause.PREEMPTED, "n[1-", ""),
        (Cause.TIMED_OUT, ["n1", "n7"], " n7"),  # this job cannot be requeued
    ],
)
def test_an_excluded_node_stays_excluded_in_a_new_job_where_others_work(
    run: RunDirectory, cause: Cause, nodes: list[str] | str, without: str
) -> None:
    """Also if the run continues in a new job for another reason. Slurm's choice is kept if the nodes are unknown."""
    left_out = {"attempt": 0, "time": time.time(), "event": "excluded", "nodes": ["n7"], "failures": [2]}
    happened(run, left_out)
    controller = FakeController(cause)
    controller.usable_nodes = lambda: nodes if isinstance(nodes, list) else expand(nodes)  # type: ignore[method-assign]
    supervised(run, controller, job=dataclasses.replace(JOB, policy="resubmit"))
    assert controller.asked == [f"resubmit{without}"]


# ---- hangs


@pytest.mark.parametrize(
    ("watchdog", "code", "names"),
    [
        (Watchdog(), recovery.RESTART, ["started", "hung", "restarted"]),
        (Watchdog(on_hang="end"), 1, ["started", "hung", "failed"]),
    ],
)
def test_a_hung_run_is_killed_and_then_restarted_or_ended_as_its_definition_says(
    run: RunDirectory,
    capsys: pytest.CaptureFixture[str],
    watchdog: Watchdog,
    code: int,
    names: list[str],
) -> None:
    """No rank exits when it is told to; the hung one is the first failure, whatever the others record."""
    hang = Hang((1,), "n1", 7, 606.0, "rank 1 (n1) has been stuck at step 7 for 606 s", 605.0)
    killed = threading.Event()

    class Hanging(Killed):
        def wait(self) -> int:
            attempt.post(hang)
            assert killed.wait(10)
            return 137

        def kill(self) -> None:
            killed.set()

        def exit_statuses(self) -> Mapping[int, ExitStatus]:
            return dict(sorted(super().exit_statuses().items()))

    job = dataclasses.replace(JOB, watchdog=watchdog)
    ranks = Hanging(run, {"end": "died"})
    attempt = Attempt(run, job, run.create_attempt(), ranks, FakeController(Cause.NONE))
    assert attempt.supervise() == code
    assert [event["event"] for event in run.events()] == names
    reason = run.events()[-1]["reason"]
    assert reason == ("rank 1 (n1) hung" if watchdog.on_hang == "restart" else hang.what)
    says(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("command", "kills", "seen"), [("kill -9 $$", 1, True), ("kill -9 $$", 0, False), ("exit 3", 1, False)]
)
def test_a_local_rank_was_out_of_memory_only_if_the_kernel_has_killed_a_process_meanwhile(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, command: str, kills: int, seen: bool
) -> None:
    """The kernel counts such kills. SIGKILL may come from anybody."""
    counts = iter([7, *[7 + kills] * 2])
    monkeypatch.setattr("clusterddp.supervisor.launcher.oom_kills", lambda: next(counts))
    launcher = RanksHere(JOB)
    launcher.start(["/bin/sh", "-c", command], os.environ, run.attempt_logs(run.create_attempt()))
    launcher.wait()
    assert [status.oom_kill for status in launcher.exit_statuses().values()] == [seen, seen]


class Unkillable(RanksHere):
    """Its ranks outlive a KILL, until ``end``."""

    def kill(self) -> None: ...

    def end(self) -> None:
        super().kill()


def test_a_local_rank_that_outlives_a_kill_is_abandoned(run: RunDirectory) -> None:
    """As one in state D would; the other one's end is known."""
    logs = run.attempt_logs(run.create_attempt())
    launcher = Unkillable(JOB)
    launcher.start(["/bin/sh", "-c", "[ $RANK = 0 ] || exec sleep 60; exit 3"], os.environ, logs)
    failed: list[int] = []
    launcher.failed = lambda rank: (failed.append(rank), launcher.abandon())
    assert launcher.wait() == 3
    assert any("sleep 60" in command for command in descendants(os.getpid()).values()), "it was waited for"
    assert failed == [0] and launcher.exit_statuses() == {0: ExitStatus(exit_code=3)}
    launcher.end()


def test_a_disk_that_delays_the_history_is_no_hang_of_the_ranks(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be waiting for the same disk; their timeout continues when it answers."""
    blocked, disk, killed, real = threading.Event(), threading.Event(), threading.Event(), append_line

    def append(path: Path, line: Mapping[str, Any]) -> None:
        if line["event"] == "checkpoint":
            blocked.set()
            assert disk.wait(20)
        real(path, line)

    class Hanging(Killed):
        def wait(self) -> int:
            attempt.post(reported(0, "joined", {"host": "n1"}))
            attempt.post(reported(0, "checkpoint", {"step": 4, "durable_s": 0.1}))
            assert blocked.wait(10)
            attempt.post(reported(0, "alive", {"count": 5, "step": 4, "age_s": 0.0, "allowed_s": 0.1}))
            assert not killed.wait(1.0)  # several times what a rank may take
            disk.set()
            assert killed.wait(10)
            return 137

        def kill(self) -> None:
            killed.set()

    monkeypatch.setattr("clusterddp.supervisor.history.append_line", append)
    job = dataclasses.replace(JOB, watchdog=Watchdog(step_s=0.1))
    ranks = Hanging(run, {"end": "died"})
    attempt = Attempt(run, job, run.create_attempt(), ranks, FakeController(Cause.NONE))
    assert attempt.supervise() == recovery.RESTART
    assert [event["event"] for event in run.events()] == ["started", "checkpoint", "hung", "restarted"]


def test_a_restart_waits_for_the_end_of_an_outage_of_the_disk(
    run: RunDirectory, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outage may be what broke the rank. The next attempt would find it, too."""
    real = append_line

    def append(path: Path, line: Mapping[str, Any]) -> None:
        if line["event"] in ("rank_failed", "restarted") and len(fake_slurm.pauses) < 3:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        real(path, line)

    monkeypatch.setattr("clusterddp.supervisor.history.append_line", append)
    attempt = Attempt(run, JOB, run.create_attempt(), NeverStarted(run, {}), FakeController(Cause.NONE))
    assert attempt.supervise() == recovery.RESTART
    assert [event["event"] for event in run.events()][-2:] == ["rank_failed", "restarted"]


def test_the_ranks_are_told_to_stop_while_the_disk_blocks_the_history(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No answer to a rank waits for a file."""
    disk, real = threading.Event(), append_line
    told: queue.Queue[Any] = queue.Queue()

    def append(path: Path, line: Mapping[str, Any]) -> None:
        assert disk.wait(20)
        real(path, line)

    class Listening(FakeRanks):
        def start(self, command: list[str], environment: Mapping[str, str], logs: Path) -> None:
            super().start(command, environment, logs)
            address, token = environment[protocol.SUPERVISOR], environment[protocol.TOKEN]
            threading.Thread(target=self._join, args=(address, token), daemon=True).start()

        def _join(self, address: str, token: str) -> None:
            channel = ControlChannel.join(address, token, 0, 1, timeout=10)
            assert channel is not None
            channel.listen(lambda: None, told.put)
            attempt.post(Notice(0.0))  # the time limit is over

    monkeypatch.setattr("clusterddp.supervisor.history.append_line", append)
    attempt = Attempt(run, JOB, run.create_attempt(), Listening(run, STOPPED), FakeController(Cause.TIME_LIMIT))
    supervisor = threading.Thread(target=attempt.supervise)
    supervisor.start()
    assert told.get(timeout=10) == orders.Stop("time limit")
    disk.set()
    supervisor.join()
    assert [event["event"] for event in run.events()] == ["started", "notice", "requeued"]


class Endless(FakeRanks):
    """Ranks that run until they are killed."""

    def __init__(self, run: RunDirectory, end: Mapping[str, Any] = STOPPED) -> None:
        super().__init__(run, end)
        self.killed = threading.Event()

    def wait(self) -> int:
        self.killed.wait()
        return 137

    def kill(self) -> None:
        self.killed.set()


def ended(attempt: Attempt) -> int | BaseException:
    """What an attempt returns or raises, within 20 s."""
    found: queue.Queue[int | BaseException] = queue.Queue()

    def supervise() -> None:
        try:
            found.put(attempt.supervise())
        except BaseException as error:
            found.put(error)

    threading.Thread(target=supervise, daemon=True).start()
    return found.get(timeout=20)


@pytest.mark.parametrize(
    "broken", ["clusterddp.supervisor.control_server.Outbox.retry", "clusterddp.supervisor.controller.Monitor._asked"]
)
def test_an_error_in_a_thread_of_the_supervisor_ends_it_with_that_error(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Without its control server it would hear no rank, without its monitor it would miss a preemption."""

    def fail(*_: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(broken, fail)
    error = ended(Attempt(run, JOB, run.create_attempt(), Endless(run), FakeController(Cause.NONE)))
    assert isinstance(error, RuntimeError) and str(error) == "boom"


def test_a_run_directory_that_was_removed_ends_its_job_and_says_why(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing that the ranks do can be kept: they would hold their nodes until the time limit."""
    monkeypatch.setattr(monitor.Monitor, "look_s", 0.01)
    monkeypatch.setattr(monitor.Monitor, "removed_s", 0.05)

    class Removing(Endless):
        def start(self, command: list[str], environment: Mapping[str, str], logs: Path) -> None:
            shutil.rmtree(run.path)

    run.job_file.write_text(JOB.to_yaml())
    controller = FakeController(Cause.NONE)
    assert ended(Attempt(run, JOB, run.create_attempt(), Removing(run), controller)) == 1
    assert controller.asked == [] and not run.path.exists()
    assert f"{run} was removed, renamed or replaced. Terminating the ranks" in capsys.readouterr().err


def test_what_cannot_pass_is_not_asked_again(run: RunDirectory) -> None:
    """A folder whose mode was changed: the job ends instead of holding its nodes."""
    denied = PermissionError(errno.EACCES, "Permission denied", str(run.private))
    controller = FakeController(denied, SlurmUnavailable("never reached"))
    error = ended(Attempt(run, JOB, run.create_attempt(), FakeRanks(run, {"end": "died"}), controller))
    assert isinstance(error, RunDirectoryError)
    assert str(error).startswith(f"{run.private}: Permission denied") and "--run-dir" in str(error)


def test_a_task_that_srun_cannot_launch_does_not_leave_the_others_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun reports it and continues: seen when a cable was cut in the second of the launch."""
    srun = tmp_path / "srun"
    srun.write_text(
        "#!/bin/bash\ntrap 'kill $!; exit 137' QUIT\nsleep 60 &\n"
        "echo 'srun: error: task 1 launch failed: Slurmd could not connect IO' >&2\nwait\n"
    )
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    before = signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # as the supervisor does
    launcher = SlurmLauncher(JOB)
    launcher.read_interval_s = 0.05
    launcher.start(["true"], {**os.environ, protocol.SUPERVISOR: ":1"}, tmp_path)
    signal.signal(signal.SIGQUIT, before)
    assert launcher.wait() == 137
    assert launcher.exit_statuses()[1].not_started == "Slurmd could not connect IO"


class Srun(FakeRanks):
    """An srun that prints these messages and fails. Its tasks leave no record."""

    def __init__(self, run: RunDirectory, messages: str, code: int = 1) -> None:
        super().__init__(run, {"end": "died"})
        self._messages, self._code = messages, code

    def start(self, command: list[str], environment: Mapping[str, str], logs: Path) -> None:
        (logs / "srun.err").write_text(self._messages)

    def exit_statuses(self) -> Mapping[int, ExitStatus]:
        return of_tasks(self._messages)

    def wait(self) -> int:
        return self._code


@pytest.mark.parametrize(
    "messages",
    [
        "srun: unrecognized option '--container-image=foo'\nTry \"srun --help\" for more information",
        "srun: cluster configuration lacks support for cpu binding\n"
        'srun: error: unrecognized --cpu-bind argument "bogus"\n'
        "srun: fatal: Failed to parse --cpu-bind= values.",
        "srun: error: Only allocated 2 nodes asked for 3",
        "srun: error: Step requested GRES but job doesn't have GRES\n"
        "srun: error: Unable to create step for job 1: Invalid generic resource (gres) specification",
        "srun: error: Unable to create step for job 1: More processors requested than permitted",
        "srun: error: Unable to create step for job 1: Requested node configuration is not available",
        "srun: error: Invalid --distribution specification",
        "srun: error: Invalid --gpu-bind argument: gpu:bogus",
        "srun: error:  mpi/pmix_v4: init: (null) [0]: mpi_pmix.c:195: pmi/pmix: can not load PMIx library\n"
        "srun: error: MPI: Unable to load any plugin\n"
        "srun: error: Invalid MPI type 'pmix', --mpi=list for acceptable types",
    ],
)
def test_a_step_that_srun_refuses_ends_the_run_with_srun_s_words_and_blames_no_node(
    run: RunDirectory, messages: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As 22.05.8 words them. It would refuse the next one, too, unless it has started ranks of this run before."""
    assert supervise(run, JOB, lambda *_: Srun(run, messages), FakeController(Cause.NONE)) == 1
    failed = [event for event in run.events() if event["event"] in ("rank_failed", "launch_failed", "failed")]
    assert [event["event"] for event in failed] == ["launch_failed", "failed"]
    assert failed[0]["lines"] == messages.splitlines() and "suspect" not in failed[0]
    box = capsys.readouterr().err
    assert all(line in box for line in messages.splitlines()) and "rank 0" not in box
    for event in ({"event": "started"}, {"event": "training", "step": 0}, {"event": "restarted", "step": 7}):
        happened(run, {"time": time.time(), "attempt": 1, **event})
    run.create_attempt()
    later = Attempt(run, JOB, run.create_attempt(), Srun(run, messages), FakeController(Cause.NONE))
    assert later.supervise() == recovery.RESTART


def test_a_missing_slurm_does_not_hide_why_srun_failed(run: RunDirectory) -> None:
    """Without scontrol, the cause of a stop is unknown."""
    missing = "/usr/bin/env: 'srun': No such file or directory"
    away = FakeController(Cause.UNKNOWN)
    assert Attempt(run, JOB, run.create_attempt(), Srun(run, missing, 127), away).supervise() == 1
    passes = "srun: error: Unable to create step for job 1: Socket timed out on send/recv operation"
    other = RunDirectory(run.path.parent / "other")
    other.path.mkdir()
    Attempt(other, JOB, other.create_attempt(), Srun(other, passes), away).supervise()
    assert [one.events()[1]["event"] for one in (run, other)] == ["launch_failed", "launch_failed"]
    assert (outcome_of(run) or {})["state"] == "failed" and other.outcome() is None


@pytest.mark.parametrize(
    "messages",
    [
        "srun: error: Unable to create step for job 1: Job/step already completing or completed",
        "srun: error: Unable to create step for job 1: Socket timed out on send/recv operation",
        "srun: error: Unable to confirm allocation for job 1: Unable to contact slurm controller (connect failure)",
        "slurmstepd: error: something new",
    ],
)
def test_an_srun_that_fails_for_another_reason_is_started_again_three_times(run: RunDirectory, messages: str) -> None:
    """No rank and no node counts as failed."""
    assert supervise(run, JOB, lambda *_: Srun(run, messages), FakeController(Cause.NONE)) == 1
    names = [event["event"] for event in run.events()]
    assert names == [*("started", "launch_failed", "restarted") * 2, "started", "launch_failed", "failed"]
    assert not any("suspect" in event for event in run.events())


def test_why_srun_failed_does_not_matter_once_the_controller_explains_it(run: RunDirectory) -> None:
    """A preemption before the step was created."""
    messages = "srun: error: Unable to create step for job 1: Job/step already completing or completed"
    Attempt(run, JOB, run.create_attempt(), Srun(run, messages), FakeController(Cause.PREEMPTED)).supervise()
    assert [event["event"] for event in run.events()] == ["started", "requeued"]


def test_a_missing_srun_is_a_failure_of_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    launcher = SlurmLauncher(JOB)
    launcher.start(["true"], {**os.environ, protocol.SUPERVISOR: ":1"}, tmp_path)
    assert launcher.wait() != 0
    assert launch_failure((tmp_path / "srun.err").read_text()).refused


def test_a_node_that_srun_reports_as_failed_is_lost_rather_than_the_ranks_that_srun_then_killed(
    run: RunDirectory,
) -> None:
    """Their processes are reported first, and no connection of the failed node has broken yet."""
    messages = "srun: error: Node failure on n2\nsrun: error: n1: task 0: Killed\n"
    job, nodes = dataclasses.replace(JOB, nodes=2, gpus_per_node=1), ("n1", "n2")
    controller = FakeController(Cause.NONE)
    controller.nodes = ["n1", "n2", "n3"]
    Attempt(
        run, job, run.create_attempt(), Srun(run, messages, 137), controller, None, Placement(nodes, nodes)
    ).supervise()
    lost = {event["event"]: event for event in run.events() if event["event"] in ("rank_failed", "node_lost")}
    assert lost["node_lost"]["node"] == "n2" and lost["rank_failed"]["suspect"] == "n2"


def test_a_rank_that_dies_before_it_joins_does_not_count_against_its_node(run: RunDirectory) -> None:
    """Its environment may be incomplete, its interpreter missing."""
    messages = "srun: error: n1: tasks 0-1: Exited with exit code 2\n"
    Attempt(run, JOB, run.create_attempt(), Srun(run, messages, 2), FakeController(Cause.NONE)).supervise()
    (failed,) = (event for event in run.events() if event["event"] == "rank_failed")
    assert "suspect" not in failed and "os._exit" not in failed["error"]


class NeverStarted(FakeRanks):
    """Ranks that the launcher does not start, although it returns 0."""

    def __init__(self, run: RunDirectory, reported: Mapping[int, ExitStatus]) -> None:
        super().__init__(run, {"end": "done"})
        self._reported = reported

    def start(self, command: list[str], environment: Mapping[str, str], logs: Path) -> None: ...

    def exit_statuses(self) -> Mapping[int, ExitStatus]:
        return self._reported


@pytest.mark.parametrize(
    ("reported", "words"),
    [
        (
            dict.fromkeys((0, 1), ExitStatus(not_started="Slurmd could not execve job")),
            "was not started: Slurmd could not",
        ),
        ({}, "never joined: the launcher returned 0, but the process left no record"),
    ],
    ids=["named by srun", "unnamed"],
)
def test_ranks_that_never_started_have_not_finished_although_the_launcher_returned_0(
    run: RunDirectory, reported: Mapping[int, ExitStatus], words: str
) -> None:
    """Seen on 22.05.8: slurmstepd lost its cgroup, srun reported both tasks and returned 0, the run was "completed"."""
    attempt = Attempt(run, JOB, run.create_attempt(), NeverStarted(run, reported), FakeController(Cause.NONE))
    assert attempt.supervise() == recovery.RESTART
    failed = next(event for event in run.events() if event["event"] == "rank_failed")
    assert failed["rank"] == 0 and words in failed["error"]
    assert run.outcome() is None


LACKING = {
    "end": "exception",
    "error": "DeviceError: the ranks on node n1 need 8 GPUs, but Slurm gave 7",
    "lacks_gpus": True,
}


@pytest.mark.parametrize(
    ("nodes", "local", "ends", "asked"),
    [
        (["n1", "n2", "n3"], False, ["rank_failed", "excluded", "resubmitted"], ["resubmit n1"]),
        (["n1"], False, ["rank_failed", "not_excluded", "stopped"], []),
        (["n1", "n2"], True, ["rank_failed", "stopped"], []),
    ],
)
def test_a_run_whose_node_has_lost_a_gpu_continues_without_that_node_or_stops(
    run: RunDirectory, nodes: list[str], local: bool, ends: list[str], asked: list[str]
) -> None:
    """It has made progress before, so that it is not the job that asks for too many; it never ends as failed."""
    for event in ({"event": "started"}, {"event": "training", "step": 0}, {"event": "restarted", "step": 7}):
        happened(run, {"time": time.time(), "attempt": 0, **event})
    controller = FakeController(Cause.NONE)
    controller.nodes = nodes
    if local:
        controller.resubmits = False
    Attempt(run, JOB, run.create_attempt(), FakeRanks(run, LACKING), controller).supervise()
    own = [event for event in run.events() if event["attempt"] == 1]
    assert [event["event"] for event in own[1:]] == ends
    assert controller.asked == asked and run.outcome() is None
    assert own[1].get("suspect") == (None if local else "n1") and own[1]["lacks_gpus"]
    assert "the ranks on node n1 need 8 GPUs, but Slurm gave 7" in own[-1]["reason"]


@pytest.mark.parametrize("where", ["the batch step's node", "a rank's node"])
@pytest.mark.parametrize(
    ("earlier", "nodes", "ends", "asked"),
    [
        (True, ["n1", "n2", "n3"], ["excluded", "resubmitted"], ["resubmit n1"]),
        (True, ["n1"], ["not_excluded", "stopped"], []),
        (False, ["n1", "n2", "n3"], ["failed"], []),
    ],
)
def test_a_run_whose_node_lacks_the_interface_continues_without_that_node_or_stops(
    run: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    earlier: bool,
    nodes: list[str],
    ends: list[str],
    asked: list[str],
) -> None:
    """If no attempt has started the script, all nodes probably lack it."""
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    job = dataclasses.replace(JOB, interface=("ib99",))
    if earlier:
        for event in ({"event": "started"}, {"event": "phase", "phase": "importing"}, {"event": "requeued"}):
            happened(run, {"time": time.time(), "attempt": 0, **event})
    controller = FakeController(Cause.NONE)
    controller.nodes = nodes
    lacking = {"end": "exception", "error": "InterfaceMissing: interface: n1 has no ib99", "lacks_interface": True}
    ranks = FakeRanks(run, lacking) if where == "a rank's node" else SlurmLauncher(job)
    number = run.create_attempt()
    Attempt(run, job, number, ranks, controller).supervise()
    own = [event for event in run.events() if event["attempt"] == number][-len(ends) - 1 :]
    assert [event["event"] for event in own[1:]] == ends
    assert own[0]["suspect"] == "n1" and own[0]["lacks_interface"]
    assert controller.asked == asked and (run.outcome() is None) == earlier
    assert "has no ib99" in own[-1]["reason"]


# ---- limits


def history(*attempts_: tuple[str, bool]) -> list[dict[str, Any]]:
    """Attempts of an hour each: the cause of its end, and whether it committed a checkpoint."""
    events: list[dict[str, Any]] = []
    for number, (cause, saved) in enumerate(attempts_):
        start = 3600.0 * number
        events.append({"event": "started", "attempt": number, "time": start, "ranks": 2})
        events.append({"event": "phase", "attempt": number, "time": start + 60, "phase": "importing"})
        if saved:
            events.append({"event": "checkpoint", "attempt": number, "time": start + 1800, "step": number})
        events.append({"event": "requeued", "attempt": number, "time": start + 3600, "cause": cause})
    return events


LIMIT = Cause.TIME_LIMIT.value


@pytest.mark.parametrize(
    ("limits", "events", "reason"),
    [
        (Limits(), history((LIMIT, True)) * 1, None),
        (Limits(attempts=2), history((LIMIT, True)), None),
        (Limits(attempts=2), history((LIMIT, True), (LIMIT, True)), "limits.attempts (2) reached"),
        (Limits(gpu_hours=4.5), history((LIMIT, True), (LIMIT, True)), None),
        (
            Limits(gpu_hours=4),
            history((LIMIT, True), (LIMIT, True)),
            "limits.gpu_hours (4) reached: 4.00 used. Raise it with --change --set limits.gpu_hours=N",
        ),
        (Limits(), history((LIMIT, False), (LIMIT, False)), None),
        (Limits(), history((LIMIT, True), *[(LIMIT, False)] * 3), "3 consecutive attempts"),
        (Limits(), history(*[(LIMIT, False)] * 9), None),
        (Limits(), history(*[(Cause.PREEMPTED.value, False)] * 9), None),
    ],
)
def test_a_run_ends_at_its_limits_and_no_earlier(
    limits: Limits, events: list[dict[str, Any]], reason: str | None
) -> None:
    """Two ranks, attempts of an hour. Early preemptions, however many, do not count against the run; and a script that
    does its own saving, which is not known here, may take as many time limits as it needs."""
    job = dataclasses.replace(JOB, limits=limits)
    found = exceeded(job, view(events), now=events[-1]["time"])
    assert (found or "").startswith(reason) if reason else found is None


def test_long_attempts_of_a_script_that_records_no_steps_are_not_fruitless() -> None:
    """It may have saved checkpoints of its own; three short failures in a row end the run."""

    def ended(*minutes: float) -> list[dict[str, Any]]:
        times = ((number, 3600.0 * number, 60.0 * length) for number, length in enumerate(minutes))
        return [
            {"event": event, "attempt": number, "time": start + length * (event == "restarted")}
            for number, start, length in times
            for event in ("started", "restarted")
        ]

    assert exceeded(JOB, view(ended(10, 10, 10, 10)), now=1e6) is None
    assert exceeded(JOB, view(ended(1, 10, 1, 1)), now=1e6) is None
    assert "3 consecutive attempts failed" in (exceeded(JOB, view(ended(10, 1, 1, 9)), now=1e6) or "")
    recorded = [{**event, "step": 4} for event in ended(10, 10, 10)]
    assert "3 consecutive attempts failed" in (exceeded(JOB, view(recorded), now=1e6) or "")


@pytest.mark.parametrize(
    ("seconds", "phases", "steps_seen", "values", "ends"),
    [
        (12.0, ["importing"], False, {}, True),
        (5000.0, [], False, {}, True),  # torch is still being imported, or nodes are set up
        (5000.0, ["importing", "rendezvous"], False, {}, True),
        (90.0, ["importing"], False, {}, True),
        (700.0, ["importing"], False, {}, False),
        (90.0, ["importing"], True, {}, False),
        (12.0, ["importing"], False, {"see_steps": False}, True),
        (90.0, ["importing"], False, {"see_steps": False}, False),
    ],
)
def test_a_time_limit_that_leaves_no_time_for_a_step_ends_the_run(
    seconds: float, phases: list[str], steps_seen: bool, values: dict[str, Any], ends: bool
) -> None:
    """Else it would be requeued forever. `time_min` may be shorter than a start, or an administrator lowered the limit.
    A script whose steps nobody sees may have trained."""
    events = [
        {"event": event, "attempt": number, "time": 1e4 * number + at, **more}
        for number in range(3)
        for event, at, more in (
            ("started", 0.0, {}),
            *(("phase", 1.0, {"phase": phase}) for phase in phases),
            *([("steps_seen", 2.0, {})] if steps_seen else []),
            ("requeued", seconds, {"cause": LIMIT}),
        )
    ]
    job = dataclasses.replace(JOB, **values)
    found = exceeded(job, view(events), now=1e6)
    assert (found is not None) == ends
    assert exceeded(job, view(events[: -len(events) // 3]), now=1e6) is None
    if ends:
        shortest = dataclasses.replace(job, time_min_s=120)
        assert "`time_min` (0-00:02:00)" in (exceeded(shortest, view(events), now=1e6) or "")


def test_each_attempt_counts_with_the_ranks_that_it_had() -> None:
    """An hour with 2 ranks, then one with 4."""
    events = history((LIMIT, True), (LIMIT, True))
    events[0]["ranks"], events[4]["ranks"] = 2, 4
    for hours, ended in ((6, True), (6.1, False)):
        job = dataclasses.replace(JOB, limits=Limits(gpu_hours=hours))
        assert (exceeded(job, view(events), now=events[-1]["time"]) is not None) == ended


@pytest.mark.parametrize(("device", "hours"), [("cuda", 16), ("cpu", 4)])
def test_a_rank_counts_with_each_of_its_gpus(device: Literal["cuda", "cpu"], hours: int) -> None:
    """Two hours of two ranks with four GPUs each, or of two ranks without GPUs."""
    job = Job(name="x", module="x", gpus_per_node=8, gpus_per_rank=4, device=device, limits=Limits(gpu_hours=hours))
    events = history((LIMIT, True), (LIMIT, True))
    found = exceeded(job, view(events), now=events[-1]["time"])
    assert found and f"{hours:.2f} used" in found
    more = dataclasses.replace(job, limits=Limits(gpu_hours=hours + 1))
    assert exceeded(more, view(events), now=events[-1]["time"]) is None


def test_of_a_range_of_nodes_the_job_has_what_slurm_gave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt's ranks are counted by it, and share its CPUs; without a range nothing is asked."""
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE", raising=False)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "24")
    job = Job(name="x", module="x", nodes=4, min_nodes=2, gpus_per_node=8)
    given = as_started(job, {"SLURM_JOB_NUM_NODES": "3"})
    assert given.world_size == 24
    assert {"--nodes=3", "--ntasks=24", "--ntasks-per-node=8", "--cpus-per-task=3"} <= set(
        srun_command(given, Path("/logs"))
    )
    assert as_started(JOB, {}) is JOB


def test_a_result_may_have_any_name_of_the_scripts_own(run: RunDirectory) -> None:
    """The history stays readable: ``run.log(ranks=0.5)`` after the loop is not a number of ranks."""
    names = {"ranks": 0.5, "redone": "twice", "job": None, "nodes": 3.5, "suspect": 1.0, "reason": 2.0}
    happened(run, {"time": 1.0, "attempt": 0, "event": "result", "step": 7, **names})
    _, events = supervised(run, FakeController(Cause.NONE), {"end": "died", "error": "killed"})
    assert events == ["result", "started", "rank_failed", "restarted"]
    assert book(run.history(), time.time()).total_s and between_interruptions_s(run.history(), time.time())


def test_idle_nodes_of_a_job_count_as_those_with_ranks() -> None:
    """A spare, and a node that the ranks have left: two ranks each, for an hour."""
    events = history((LIMIT, True))
    events[0] |= {"ranks": 2, "spares": ["n2"], "aside": ["n3"]}
    for hours, ended in ((6, True), (6.1, False)):
        job = dataclasses.replace(JOB, limits=Limits(gpu_hours=hours))
        assert (exceeded(job, view(events), now=events[-1]["time"]) is not None) == ended


def test_an_attempt_may_use_what_the_ones_before_have_left() -> None:
    """Two ranks have used an hour each, or half of one if the record ends there. Waiting is free."""
    events = history((Cause.PREEMPTED.value, True))
    for hours, left_s in ((3.0, 1800.0), (2.0, 0.0), (1.0, -1800.0)):
        job = dataclasses.replace(JOB, limits=Limits(gpu_hours=hours))
        assert gpu_hours_end(job, view(events), 50_000.0) == pytest.approx(50_000.0 + left_s)
        assert gpu_hours_end(job, view(events[:-1]), 50_000.0) == pytest.approx(50_000.0 + left_s + 1800.0)
    job = dataclasses.replace(JOB, limits=Limits(gpu_hours=3.0))
    assert gpu_hours_end(job, view(events), 50_000.0, idle_nodes=1) == pytest.approx(50_900.0)
    assert gpu_hours_end(JOB, view(events), 50_000.0) == math.inf


def test_time_in_the_queue_is_not_charged(run: RunDirectory) -> None:
    """Ten hours between a requeue and the next start cost no GPU hour."""
    job = dataclasses.replace(JOB, limits=Limits(gpu_hours=3))
    events = history((Cause.PREEMPTED.value, True))
    assert exceeded(job, view(events), now=11 * 3600.0) is None
    assert exceeded(job, view(events[:1]), now=11 * 3600.0) is not None


def test_slow_saves_are_distinguished_from_no_reason_to_stop(run: RunDirectory) -> None:
    """The cause is read with the very lead that the ranks were told with."""
    seen: list[float] = []

    class Noting(FakeController):
        def why(self, notice_s: float) -> Cause:
            seen.append(notice_s)
            return Cause.TIME_LIMIT

    class Saving(FakeRanks):
        def wait(self) -> int:
            attempt.post(reported(0, "checkpoint", {"step": 4, "durable_s": 100.0}))
            return super().wait()

    attempt = Attempt(run, JOB, run.create_attempt(), Saving(run, STOPPED), Noting(Cause.TIME_LIMIT))
    attempt.supervise()
    assert seen == [310.0]
    assert Timeouts().notice_s < 310


def test_ranks_that_were_told_of_a_time_limit_that_is_extended_meanwhile_are_requeued(run: RunDirectory) -> None:
    """By an administrator, or by a suspension, which does not count: nothing else would continue the run."""

    class Noticed(FakeRanks):
        def wait(self) -> int:
            attempt.post(Notice(time.time() + 1.0))
            return super().wait()

    attempt = Attempt(run, JOB, run.create_attempt(), Noticed(run, STOPPED), FakeController(Cause.NONE))
    attempt.supervise()
    assert (run.events()[-1]["event"], run.events()[-1]["cause"]) == ("requeued", LIMIT)


@pytest.mark.parametrize(("batch_step", "begun"), [(107.4, 107.4), (112.0, 108.0), (106.5, 107.0)])
def test_a_job_got_its_nodes_when_its_batch_step_began_as_far_as_slurms_whole_seconds_allow(
    batch_step: float, begun: float
) -> None:
    """A prolog may take long; and the clocks of a node and the controller may differ."""
    job = JobInfo("41", "RUNNING", "None", "n1", 0, None, None, submit_time=93.0, eligible_time=100.0, start_time=107.0)
    assert allocated(job, batch_step) == Allocated(submitted=93.0, eligible=100.0, begun=begun)
    assert allocated(dataclasses.replace(job, start_time=None), batch_step) is None


def test_a_batch_step_begins_with_its_slurmstepd() -> None:
    """Which needs a while until it starts the batch script; another parent says nothing about the job."""
    child = "from clusterddp.supervisor.controller import batch_step_began as began; print(began())"
    parent = f"""if True:
        import subprocess, sys, time
        open("/proc/self/comm", "w").write(sys.argv[1])
        time.sleep(0.2)
        subprocess.run([sys.executable, "-c", {child!r}])"""
    for name, least, most in (("slurmstepd", -0.02, 0.02), ("slurmd", 0.18, 60.0)):
        before = time.time()
        run = subprocess.Popen([sys.executable, "-c", parent, name], stdout=subprocess.PIPE, text=True)
        found = started_at(run.pid)
        assert found is not None and found >= before - 0.02
        assert least <= float(run.communicate(timeout=60)[0]) - found <= most


def test_a_process_knows_when_it_started_even_after_an_exec() -> None:
    """As the supervisor, which the batch script becomes."""
    code = "import os; from clusterddp.process import started_at; print(started_at(os.getpid()))"
    before = time.time()
    shell = ["sh", "-c", f'exec {sys.executable} -c "{code}"']
    at = float(subprocess.run(shell, capture_output=True, text=True, check=True).stdout)
    assert before - 0.02 <= at <= time.time()


def test_a_run_that_is_done_is_concluded_with_its_last_step(run: RunDirectory) -> None:
    """The supervisor whose ranks finished may have died with its node before it recorded their last checkpoint."""
    happened(run, {"event": "checkpoint", "attempt": 0, "time": 1.0, "step": 3})
    append_line(run.metrics_file, {"step": 9, "attempt": 0, "loss": 1.0})
    assert main.conclude(run, JOB, 1, Completed, "done exists") == 0
    assert (outcome_of(run) or {})["step"] == 10
