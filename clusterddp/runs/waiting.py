"""Waits for runs: for ``wait``, ``submit --wait`` and ``Handle.wait()``.

One loop looks at the runs' files. ``slurm/polling.py`` decides when it asks the controller, about all runs at once.
With ``--resubmit``, it also does from a login node what a run's own job cannot. After a requeue, Slurm holds the job,
by default for two minutes. Its owner may lift the hold. A run is resubmitted if its job ended without continuing it:
its first node died and the job could not be requeued, scontrol is missing on the nodes, or Slurm refused its next job.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import NamedTuple

from clusterddp.errors import INTERRUPTED, TIMED_OUT, WAITED, ClusterddpError, RunDirectoryError, SlurmError
from clusterddp.failures import exclusion, node_memory
from clusterddp.history.beginnings import Started
from clusterddp.history.checkpoints import Checkpoint, SavedItself
from clusterddp.history.ends import AttemptEnd, Stopped
from clusterddp.history.event import Event
from clusterddp.history.outcome import how_it_ended
from clusterddp.history.view import RunView
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.load import load_resolved
from clusterddp.reporter import show, what_failed
from clusterddp.rundir.claims import JobClaim, read_claim
from clusterddp.rundir.files import LASTING, exists
from clusterddp.rundir.job_log import early_end
from clusterddp.rundir.ownership import check_run
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.summary import Summary, summarize
from clusterddp.runs.progress_display import Progress, Shown
from clusterddp.runs.run_status import state_sentence
from clusterddp.slurm import commands as slurm
from clusterddp.slurm.commands import TIMEOUT_S, JobInfo
from clusterddp.slurm.configuration import usable_nodes
from clusterddp.slurm.polling import IMMINENT_S, QUIET_S, SILENT_S, SOON_S, Activity, Pace
from clusterddp.slurm.run_states import Cause, RunState, run_states
from clusterddp.supervisor.lease import holders, reachable, started, submitted, submitting
from clusterddp.supervisor.retry_limits import stop_request

#: Seconds between two looks at the runs' files.
FILE_CHECK_S = 1.0
#: The same, while their progress is shown.
SHOWN_FILE_CHECK_S = 0.2
#: Seconds for which a shared disk may hide a new file (NFS: acdirmax is 60 s), with some reserve.
HIDDEN_S = 90.0
#: States of jobs that ended neither by the user's request nor by a failure of the script.
_INVOLUNTARY_ENDS = frozenset(("NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "TIMEOUT"))
#: Seconds in its hold after which a requeued job may start. slurmd refuses a credential that is not newer than the
#: second in which it revoked the previous one: a job released within that second was FAILED for good, "Job credential
#: revoked" (seen on 22.05.8). The rest allows for clocks that differ between nodes.
SETTLE_S = 3.0


class Hold:
    """The hold that Slurm puts on a job after each requeue."""

    def __init__(self) -> None:
        self._of: tuple[str, int] | None = None
        self._since = 0.0

    def lift_when_safe(self, job: JobInfo) -> bool:
        """Lifts the hold if the job has been in it for long enough. Returns whether it did."""
        if job.state != "PENDING" or job.reason != "BeginTime" or not job.restarts:
            return False
        if (job.job_id, job.restarts) != self._of:  # each requeue starts a new hold, and the run may have a new job
            self._of, self._since = (job.job_id, job.restarts), time.monotonic()
        if time.monotonic() - self._since < SETTLE_S:
            return False
        slurm.lift_hold(job.job_id)
        return True


class Help(NamedTuple):
    """What a run needed or waits for, in words for the user, and the longest pause until the next question."""

    words: str
    most_s: float = IMMINENT_S


#: The run ended, or has a new job, since the controller was asked.
_CHANGED = Help("", SOON_S)


class Resubmitter:
    """Lifts the holds of one run and resubmits it."""

    def __init__(self, run: RunDirectory, job: Job) -> None:
        self._run, self._job = run, job
        self._hold = Hold()
        #: The ended jobs of the run. Slurm forgets a job MinJobAge after its end (300 s by default).
        self._ended: dict[str, JobInfo] = {}
        #: Whether a job has held the run.
        self._was_held = False

    def help(self, doubt_s: float) -> Help | None:
        """Does what the run needs. None: only its user can continue it, or it needs nothing.

        ``doubt_s``: for how many seconds the run has seemed to be over. A shared disk may still hide its outcome.
        """
        if stop_request(self._run.history()) is not None:  # its job does not continue a run that the user has stopped
            return None
        if not self._job.continues:
            return None
        if not (claims := self._claims()):
            return self._help_released(doubt_s)
        self._was_held = True
        jobs = []
        for claim in claims:  # all of them, as an unknown job may have started before a resubmission
            job = self._show_job(claim.job)
            if job is not None and job.live:
                return self._help_live(job)
            jobs.append(job)
        newest, job = claims[0].job, jobs[0]
        if self._run.outcome() is not None or self._claims() != claims:
            return _CHANGED
        early = early_end(self._run, claims[0], job.state if job else None)
        before = jobs[1] if len(jobs) > 1 else None
        if early and _ended_later(before, job):
            newest, job, early = claims[1].job, before, None  # which held the run when the newest job started
        # The user may have stopped it, or the history is hidden with all that the job has done.
        is_unread = not self._run.history() and (self._should_continue(job) or bool(early and not early.lines))
        if doubt_s < HIDDEN_S and (is_unread or self._run.may_be_over(job.state if job else None)):
            return Help(f"job {newest} ended. Waiting until its outcome is visible here")
        if self._should_continue(job):
            state = job.state if job else "unknown to Slurm"
            return self._resubmit(f"job {newest} ended ({state}) without recording an outcome", claims)
        return None

    def _show_job(self, job_id: str) -> JobInfo | None:
        """Slurm's record of a job, the last one if Slurm has forgotten the job since it ended."""
        job = slurm.show_job(job_id) or self._ended.get(job_id)
        if job is not None and not job.live:
            self._ended[job_id] = job
        return job

    def _claims(self) -> list[JobClaim]:
        """The jobs that may train the run, as far as this cluster knows them."""
        return [claim for claim in holders(self._run) if isinstance(claim, JobClaim) and reachable(claim)]

    def _help_released(self, doubt_s: float) -> Help | None:
        """Handles a run that no job holds. The newest attempt's job may have released it to submit the next one."""
        newest = self._run.newest_attempt()
        if newest is None and self._was_held and not self._run.cancelled and doubt_s < HIDDEN_S:
            return Help("waiting until the run's first attempt is visible here")
        claim = None if newest is None else read_claim(self._run.holder_file(newest), self._run)
        if self._run.outcome() is not None or not isinstance(claim, JobClaim) or not reachable(claim):
            return None
        job = self._show_job(claim.job)
        if job is not None and job.live:
            return Help(f"waiting for the run's next job after job {job.job_id}")
        history = self._run.history()
        ended = newest is not None and any(map(_is_settled, history.attempt(newest)))
        if job is None or ended or not self._should_continue(job):
            return None
        if not history and doubt_s < HIDDEN_S:
            return Help(f"job {job.job_id} ended. Waiting until its history is visible here")
        return self._resubmit(f"job {job.job_id} ended ({job.state}) before it submitted the next one", [])

    def _help_live(self, job: JobInfo) -> Help:
        if job.state != "PENDING":
            return Help(f"job {job.job_id} ({job.state}{f' on {job.nodes}' if job.nodes else ''})")
        if self._job.lift_hold and self._hold.lift_when_safe(job):
            return Help(f"lifted Slurm's hold on job {job.job_id} after the requeue")
        is_held = self._job.lift_hold and job.restarts and job.reason == "BeginTime"
        return Help(f"job {job.job_id} (PENDING): {job.reason}", SOON_S if is_held else QUIET_S)

    def _should_continue(self, job: JobInfo | None) -> bool:
        """Whether to resubmit the run: never after a scancel or ``stop``, otherwise if preemption, the time limit
        or a lost node ended its job, if a requeued job failed before its batch script ran, or if its supervisor could
        not continue it or was killed."""
        history = self._run.history()
        if self._run.cancelled or job is None or job.state == "CANCELLED" or stop_request(history) is not None:
            return False
        started = history.all(Started)
        of_job = [event for event in started if (event.job, event.restarts) == (job.job_id, job.restarts)]
        never_started = job.state == "FAILED" and bool(started) and job.restarts > 0 and not of_job
        if job.state in _INVOLUNTARY_ENDS or never_started:
            return True
        if not of_job:
            return False
        attempt = of_job[-1].attempt
        killed = job.state in ("FAILED", "OUT_OF_MEMORY") and _was_killed(history, attempt)
        return killed or _is_stuck(history, attempt, job)

    def _resubmit(self, ended: str, claims: Sequence[JobClaim]) -> Help:
        """Submits the run again, unless another process does, or has done so since these claims were read."""
        check_run(self._run)
        with submitting(self._run) as other:
            if other:
                return Help(f"{ended}. {other}")
            # A process that submitted it may have been killed, or got no answer from Slurm, before it recorded the job.
            job_id = slurm.jobs_by_script(ended=False).get(str(self._run.batch_script))
            if self._run.outcome() is not None or self._claims() != claims:  # the answer may have taken long
                return _CHANGED
            if job_id:
                job = slurm.show_job(job_id)
                # An earlier job of the run, which a lost node delays. It may have ended since squeue's answer.
                if job is not None and (job.state == "COMPLETING" or (not job.live and started(self._run, job_id))):
                    return Help(f"{ended}. Waiting until job {job_id} has left its nodes")
                submitted(self._run, job_id)
                return Help(f"{ended}. Job {job_id}, which was not recorded, continues the run")
            return self._submit(ended)

    def _submit(self, ended: str) -> Help:
        usable = partial(usable_nodes, self._job.partition)
        nodes = node_memory.left_out(self._run, self._job, usable, time.time())
        new = slurm.submit(self._run.batch_script, *exclusion.option(self._job.exclude, nodes))
        submitted(self._run, new)
        return Help(f"{ended}. Resubmitted as job {new}")


def _ended_later(job: JobInfo | None, other: JobInfo | None) -> bool:
    """Whether a job ended after another one, as far as Slurm knows both."""
    if job is None or other is None:
        return False
    return (job.end_time or 0.0) > (other.end_time or math.inf)


def _is_settled(event: Event) -> bool:
    """Whether an attempt has ended so that its job needs no help."""
    return isinstance(event, AttemptEnd) and not (isinstance(event, Stopped) and event.refused is not None)


def _is_stuck(history: RunView, attempt: int, job: JobInfo) -> bool:
    """Whether this attempt of the job is the newest and could not continue the run: Slurm refused the next job, or did
    not say why this one ended, and it was preempted."""
    end = history.attempt(attempt).last(Stopped)
    if end is None or history.is_superseded(attempt):
        return False
    unexplained = end.cause in (Cause.UNKNOWN.value, Cause.ENDED_OTHERWISE.value)
    return end.refused is not None or (unexplained and job.preempt_time is not None)


def _was_killed(history: RunView, attempt: int) -> bool:
    """Whether the supervisor of this attempt, the newest, was killed, and another job may get further: not if that of
    the attempt before was killed, too, and this one has saved nothing."""
    killed, before = history.attempt(attempt), history.attempt(attempt - 1)
    if history.is_superseded(attempt) or not killed.is_open:
        return False
    return killed.has(Checkpoint, SavedItself) or not before or not before.is_open


#: Seconds for which a run without an outcome must be stopped, or unknown, to have ended. A job may be submitted, or an
#: outcome be written, between a look at the files and the controller's answer, and the controller may be restarting.
END_SETTLE_S, UNKNOWN_S = 3.0, 300.0
_CONTINUES = ("pending", "held", "running")


class Wait:
    """A run that is waited for. With its ``job``, it is also helped: by a Resubmitter."""

    def __init__(self, run: RunDirectory, job: Job | None = None) -> None:
        self.run = run
        #: How it ended: completed, or a key of WAITED. None until then.
        self.end: str | None = None
        #: The same in a sentence.
        self.sentence = ""
        #: The longest pause until the controller is asked about it again.
        self.most_s = QUIET_S
        self._activity = Activity(run)
        self._helper = Resubmitter(run, job) if job else None
        self._words = ""
        #: Its state if that may be an end, and the time since then.
        self._doubt: tuple[str, float] | None = None

    def seen(self) -> tuple[object, str]:
        """All that is known about the run without a question."""
        return self._activity.seen(), self._words

    def look(self) -> None:
        """Reads the run's outcome."""
        with suppress(RunDirectoryError, OSError):  # then its state is unknown
            if (outcome := self.run.outcome()) is not None:
                self._ended("unconfirmed" if outcome.unconfirmed else outcome.state, how_it_ended(outcome))

    def newly_unknown(self, state: RunState) -> bool:
        """Whether the run's state is unknown, and was not at the last look."""
        return state.word == "unknown" and (self._doubt is None or self._doubt[0] != "unknown")

    def update(self, summary: Summary, state: RunState, now: float) -> None:
        """Takes the run's state, which the controller gave at the time ``now``."""
        if state.word in _CONTINUES:
            self._doubt = None
        elif self._doubt is None or self._doubt[0] != state.word:
            self._doubt = (state.word, now)
        doubt_s = now - self._doubt[1] if self._doubt else 0.0
        is_settled = self._doubt is not None and doubt_s >= self._settle_s(state)
        self.most_s = SILENT_S if self._activity.silent else QUIET_S
        if self._doubt:
            self.most_s = SILENT_S if state.word == "unknown" else FILE_CHECK_S
        if self._helper and (is_settled or state.word != "unknown") and self._is_helped(summary, state, doubt_s):
            return
        if is_settled and self.end is None:
            self._settle(summary, state)

    def _is_helped(self, summary: Summary, state: RunState, doubt_s: float) -> bool:
        """Does what a run needs that has this state. Returns whether it continues, as far as that can be seen."""
        assert self._helper
        if _needs_no_help(summary, state):
            why = f": {state.reason}" if state.word == "pending" else ""
            self._say(f"{state_sentence(summary, state)}{why}")
            return True
        try:
            help = self._helper.help(doubt_s)
        except SlurmError as error:
            help = Help(f"retrying: {error}")
        except (ClusterddpError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in LASTING:
                help = Help(f"retrying: {what_failed(error)}")
            else:  # its records cannot be read, or belong to another user
                self._ended("unknown", f"no longer waiting for this run: {what_failed(error)}")
                return True
        if help is None:  # a job that has ended since squeue's answer is in the next one
            self.most_s = min(self.most_s, IMMINENT_S)
            return False
        self._say(help.words)
        self.most_s = min(help.most_s, SILENT_S) if self._activity.silent else help.most_s
        return True

    def _settle(self, summary: Summary, state: RunState) -> None:
        """Ends the wait for a run that has seemed to be over for long enough."""
        self.look()  # the answer may have taken long
        if self.end is not None:
            return
        if summarize(self.run).claims != summary.claims:  # the run was submitted again meanwhile
            self._doubt = None
        elif state.word == "stopped" and not exists(self.run.path):
            self._ended("unknown", "unknown: its run directory was deleted")
        else:
            log = state.log if len(state.log) > 1 else ()  # the sentence has its last line
            self._ended(state.word, "\n".join([*log, state_sentence(summary, state)]))

    def _settle_s(self, state: RunState) -> float:
        """Seconds for which the run must be in this state to have ended."""
        if state.word == "unknown":
            return UNKNOWN_S
        with suppress(RunDirectoryError, OSError):
            is_unread = state.word == "failed" and not state.log and not self.run.history()
            if is_unread or self.run.may_be_over(None if state.job is None else state.job.state):
                return HIDDEN_S
        return END_SETTLE_S

    def _say(self, words: str) -> None:
        if words and words != self._words:
            show(f"{self.run.path.name}: {words}")
            self._words = words

    def _ended(self, word: str, sentence: str) -> None:
        self.end, self.sentence = word, sentence
        show(f"{self.run}: {sentence}")


def _needs_no_help(summary: Summary, state: RunState) -> bool:
    """Whether the run trains, or waits in the queue for other reasons than a hold after a requeue."""
    job = state.job
    if job is None:
        return state.word == "running"  # as local processes
    is_queued = job.state == "PENDING" and job.reason != "BeginTime"
    # Without a claim, the job has released the run, and is submitting the next one.
    return bool(summary.claims) and (is_queued or job.state in ("RUNNING", "SUSPENDED"))


class Waiting:
    """Some runs, and when to ask the controller about those that have not ended."""

    def __init__(self, waits: Sequence[Wait]) -> None:
        self._waits = waits
        self.pace = Pace()

    @property
    def left(self) -> list[Wait]:
        """Those that have not ended."""
        return [wait for wait in self._waits if wait.end is None]

    @property
    def exit_code(self) -> int:
        """0 if all runs that ended completed, otherwise the code of the worst outcome."""
        ends = {wait.end for wait in self._waits}
        return next((code for word, code in WAITED.items() if word in ends), 0)

    def look(self, enough: int, left_s: float = math.inf) -> bool:
        """Looks at the runs' files and, less often, asks the controller. Returns whether enough runs have ended.

        ``left_s``: the seconds until the deadline, which an answer of the controller must not delay.
        """
        for wait in self.left:
            wait.look()
        if self._over(enough):
            return True
        if self.pace.due(tuple(wait.seen() for wait in self.left)):
            self._ask(min(TIMEOUT_S, max(FILE_CHECK_S, left_s)))
            self.pace.asked(min((wait.most_s for wait in self.left), default=FILE_CHECK_S))
        return self._over(enough)

    def _over(self, enough: int) -> bool:
        return len(self._waits) - len(self.left) >= enough

    def _ask(self, timeout_s: float) -> None:
        """Finds the states of the runs that have not ended, by at most one call of squeue for all."""
        left = self.left
        summaries = [summarize(wait.run) for wait in left]
        states = run_states(summaries, timeout_s=timeout_s, queue=self.pace)
        now = time.monotonic()
        doubts = [state.reason for wait, state in zip(left, states, strict=True) if wait.newly_unknown(state)]
        if doubts:
            show(f"the state of a run is unknown, retrying: {doubts[0]}")
        for wait, summary, state in zip(left, summaries, states, strict=True):
            wait.update(summary, state, now)


def wait(
    runs: Sequence[RunDirectory],
    timeout_s: float | None = None,
    for_any: bool = False,
    resubmit: bool = False,
    follow: bool = False,
) -> int:
    """Waits until all runs, or any of them, are over or stopped. Returns the exit code.

    ``resubmit``: whether to lift holds and resubmit runs, and to show their events meanwhile. ``follow``: also rank 0's
    output.
    """
    if resubmit:
        for run in runs:
            check_run(run)
    jobs = [load_resolved(run.job_file) if resubmit else None for run in runs]
    waiting = Waiting([Wait(run, job) for run, job in zip(runs, jobs, strict=True)])
    enough = 1 if for_any else len(runs)
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    several = len(runs) > 1
    with ExitStack() as stack:
        displays = [
            stack.enter_context(
                Progress(
                    run,
                    job.steps,
                    None if follow else job.progress_interval,  # rank 0 prints the same lines
                    Shown(progress=not several, output=follow, label=f"{run.path.name}: " if several else ""),
                )
            )
            for run, job in zip(runs, jobs, strict=True)
            if job
        ]
        try:
            while True:
                for display in displays:
                    display.update()
                if waiting.look(enough, deadline - time.monotonic()):
                    return waiting.exit_code
                if time.monotonic() >= deadline:
                    late = [left.run.path.name for left in waiting.left]
                    shown = late if len(late) <= 5 else [*late[:5], "..."]
                    show(f"timed out: {len(late)} of {len(runs)} runs did not end ({', '.join(shown)})")
                    return TIMED_OUT
                time.sleep(SHOWN_FILE_CHECK_S if displays else FILE_CHECK_S)
        except KeyboardInterrupt:
            how = f"clusterddp wait{' --resubmit' if resubmit else ''}"
            names = " ".join(left.run.quoted for left in waiting.left)
            verb = "runs continue" if len(waiting.left) > 1 else "run continues"
            show(f"no longer waiting. The {verb}. Wait again with: {how} {names}")
            return INTERRUPTED
