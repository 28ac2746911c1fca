"""``clusterddp resubmit`` and ``submit --wait``: do from a login node what a run's own job cannot.

After a requeue, Slurm holds the job, by default for two minutes. Its owner may lift the hold. A run is resubmitted if
its job ended without continuing it: its first node died and the job could not be requeued, scontrol is missing on the
nodes, or Slurm refused its next job. For a local run, the command only waits.

``clusterddp wait``: waits until runs are over, and reports the outcome as the exit code. It does not touch them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from clusterddp.errors import (
    FAILED,
    INTERRUPTED,
    TIMED_OUT,
    UNCONFIRMED,
    WAITED,
    ClusterddpError,
    RunDirectoryError,
    SlurmError,
)
from clusterddp.events import ATTEMPT_ENDS, RUN_ENDS, how_it_ended, is_unconfirmed, over_already
from clusterddp.failures import exclusion, node_memory
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.load import load_resolved
from clusterddp.reporter import show, what_failed
from clusterddp.rundir.files import LASTING, exists
from clusterddp.rundir.ownership import check_run, early_end, read_claim, unrecorded_end
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.summary import summarize
from clusterddp.runs.progress_display import Progress, Shown
from clusterddp.runs.run_status import state_of
from clusterddp.slurm import commands as slurm
from clusterddp.slurm.commands import TIMEOUT_S, JobInfo
from clusterddp.slurm.pace import IMMINENT_S, QUIET_S, SILENT_S, SOON_S, Activity, Pace
from clusterddp.slurm.run_states import Cause, RunState, run_states
from clusterddp.supervisor.lease import holders, reachable, started, submitted, submitting
from clusterddp.supervisor.limits import SAVED_ITSELF, held

LOOK_S = 0.2
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


class Resubmitter:
    """Waits for one run, lifts its holds and resubmits it."""

    def __init__(self, run: RunDirectory, job: Job) -> None:
        self._run, self._job = run, job
        self._hold = Hold()
        self._pace, self._activity = Pace(), Activity(run)
        self._words = ""
        #: The job, as it was at the last look, if it needed no help.
        self._quiet: JobInfo | None = None
        #: The ended jobs of the run. Slurm forgets a job MinJobAge after its end (300 s by default).
        self._ended: dict[str, JobInfo] = {}
        #: The time since which the run seems to be over, without an outcome.
        self._hidden_since: float | None = None
        #: Whether a job has held the run.
        self._was_held = False
        #: None until the run is over, then the exit code: 0 if it completed, UNCONFIRMED if it is not confirmed.
        self.result: int | None = None

    def look(self) -> bool:
        """Checks the outcome and, less often, the job. Returns whether the run is over.

        Retries after a disk error, because the run may need this process afterwards.
        """
        try:
            return self._look()
        except OSError as error:
            if error.errno in LASTING:
                raise
            self._pace.asked(self._say(f"retrying: {what_failed(error)}"))
            return False

    def _look(self) -> bool:
        if outcome := self._run.outcome():
            self.result = UNCONFIRMED if is_unconfirmed(outcome) else 0 if outcome["state"] == "completed" else 1
        elif self._pace.due((self._activity.seen(), self._words)):
            try:
                most_s = self._help()
            except SlurmError as error:
                most_s = self._say(f"retrying: {error}")
            self._pace.asked(min(most_s, SILENT_S) if self._activity.silent else most_s)
        return self.result is not None

    def give_up(self, why: str) -> None:
        """Stops waiting, for this reason."""
        self.result = FAILED
        self._say(f"no longer waiting for this run: {why}")

    def leave(self) -> None:
        """Tells the user that a run that is not over continues without this process."""
        if self.result is None:
            self._say(f"no longer waiting. The run continues. Wait again with: clusterddp resubmit {self._run.quoted}")

    def _help(self) -> float:
        """Does what the run needs. Returns the longest pause until the next query of the controller."""
        if held(self._run.events()) is not None:  # the user has stopped the run, and its job does not continue it
            return self._look_on()
        if not (claims := self._claims()):
            return self._help_released()
        self._was_held = True
        if (quiet := self._quiet) and quiet.job_id == claims[0]["job"] and self._is_as_before(quiet):
            return QUIET_S
        jobs = []
        for entry in claims:  # all of them, as an unknown job may have started before a resubmission
            jobs.append(job := self._show_job(entry["job"]))
            if job is not None and job.live:
                return self._help_live(job)
        newest, job = claims[0]["job"], jobs[0]
        if self._run.outcome() is not None or self._claims() != claims:  # it ended, or has a new job, since the query
            return SOON_S
        early = early_end(self._run, claims[0], job.state if job else None)
        if early and job and len(jobs) > 1 and jobs[1] and (jobs[1].end_time or 0.0) > (job.end_time or math.inf):
            newest, job, early = claims[1]["job"], jobs[1], None  # which held the run when the newest job started
        # The user may have stopped it, or the history is hidden with all that the job has done.
        is_unread = not self._run.events() and (self._should_continue(job) or bool(early and not early.lines))
        if self._is_hidden(is_unread or self._run.may_be_over(job.state if job else None)):
            return self._say(f"job {newest} ended. Waiting until its outcome is visible here")
        ended = f"job {newest} ended ({job.state if job else 'unknown to Slurm'}) without recording an outcome"
        if self._should_continue(job):
            return self._resubmit(ended, claims)
        self.result = 1
        own = [event for event in self._run.events() if event["attempt"] == self._run.newest_attempt()]
        if early is None and not _has_end(own):
            early = unrecorded_end(self._run, newest, job.state if job else None)
        if early:
            show("\n".join(early.lines))
            ended = early.reason
        return self._say(f"{ended}. Continue with: clusterddp submit --run-dir {self._run.quoted}")

    def _show_job(self, job_id: str) -> JobInfo | None:
        """Slurm's record of a job, the last one if Slurm has forgotten the job since it ended."""
        job = slurm.show_job(job_id) or self._ended.get(job_id)
        if job is not None and not job.live:
            self._ended[job_id] = job
        return job

    def _is_as_before(self, quiet: JobInfo) -> bool:
        """Whether the job still needs no help, by an answer of squeue that other commands share."""
        self._quiet = None  # until the next look
        job = self._pace.jobs(None, [quiet.job_id], slurm.TIMEOUT_S).get(quiet.job_id)
        if job is None or (job.state, job.reason) != (quiet.state, quiet.reason):
            return False
        self._quiet = quiet
        return True

    def _is_hidden(self, may_be: bool) -> bool:
        """Whether a shared disk may not show yet that the run is over, which ``may_be``."""
        if not may_be:
            self._hidden_since = None
            return False
        now = time.monotonic()
        self._hidden_since = now if self._hidden_since is None else self._hidden_since
        return now - self._hidden_since < HIDDEN_S

    def _claims(self) -> list[dict[str, Any]]:
        """The jobs that may train the run, as far as this cluster knows them."""
        return [entry for entry in holders(self._run) if entry["kind"] == "slurm" and reachable(entry)]

    def _help_released(self) -> float:
        """Handles a run that no job holds. The newest attempt's job may have released it to submit the next one."""
        newest = self._run.newest_attempt()
        if newest is None and self._was_held and not self._run.cancelled and self._is_hidden(True):
            return self._say("waiting until the run's first attempt is visible here")
        entry = None if newest is None else read_claim(self._run.holder_file(newest), self._run)
        if self._run.outcome() is not None or not entry or entry["kind"] != "slurm" or not reachable(entry):
            return self._look_on()
        job = self._show_job(entry["job"])
        if job is not None and job.live:
            self._hidden_since = None
            return self._say(f"waiting for the run's next job after job {job.job_id}")
        events = self._run.events()
        own = [event for event in events if event["attempt"] == newest]
        ended = any(event["event"] in ATTEMPT_ENDS and "refused" not in event for event in own)
        if job is None or ended or not self._should_continue(job):
            return self._look_on()
        if self._is_hidden(not events):
            return self._say(f"job {job.job_id} ended. Waiting until its history is visible here")
        return self._resubmit(f"job {job.job_id} ended ({job.state}) before it submitted the next one", [])

    def _look_on(self) -> float:
        """Handles a run that needs no help: it trains as local processes, or is stopped."""
        state, words = state_of(self._run)
        if state in ("pending", "held", "running", "unknown"):
            return self._say(f"{words}. Waiting for the run to end")
        if self._run.outcome() is None:
            self.result = 1
            self._say(words)
        return IMMINENT_S

    def _help_live(self, job: JobInfo) -> float:
        self._hidden_since = None
        if job.state in ("RUNNING", "SUSPENDED") or (job.state == "PENDING" and job.reason != "BeginTime"):
            self._quiet = job
        if job.state != "PENDING":
            where = f" on {job.nodes}" if job.nodes else ""
            return self._say(
                f"job {job.job_id}: {job.state}{where}",
                QUIET_S if job.state in ("RUNNING", "SUSPENDED") else IMMINENT_S,
            )
        if self._job.lift_hold and self._hold.lift_when_safe(job):
            return self._say(f"lifted Slurm's hold on job {job.job_id} after the requeue")
        held = self._job.lift_hold and job.restarts and job.reason == "BeginTime"
        return self._say(f"job {job.job_id}: PENDING ({job.reason})", SOON_S if held else QUIET_S)

    def _should_continue(self, job: JobInfo | None) -> bool:
        """Whether to resubmit the run: never after a scancel or ``stop``, otherwise if preemption, the time limit
        or a lost node ended its job, if a requeued job failed before its batch script ran, or if its supervisor could
        not continue it or was killed."""
        events = self._run.events()
        if self._run.cancelled or job is None or job.state == "CANCELLED" or held(events) is not None:
            return False
        started = [event for event in events if event["event"] == "started"]
        of_job = [event for event in started if (event.get("job"), event.get("restarts")) == (job.job_id, job.restarts)]
        never_started = job.state == "FAILED" and bool(started) and job.restarts > 0 and not of_job
        if job.state in _INVOLUNTARY_ENDS or never_started:
            return True
        killed = (
            job.state in ("FAILED", "OUT_OF_MEMORY") and bool(of_job) and _was_killed(events, of_job[-1]["attempt"])
        )
        return killed or (bool(of_job) and _is_stuck(events, of_job[-1], job))

    def _resubmit(self, ended: str, claims: Sequence[Mapping[str, Any]]) -> float:
        """Submits the run again, unless another process does, or has done so since these claims were read."""
        check_run(self._run)
        with submitting(self._run) as other:
            if other:
                return self._say(f"{ended}. {other}")
            # A process that submitted it may have been killed, or got no answer from Slurm, before it recorded the job.
            job_id = slurm.jobs_by_script(ended=False).get(str(self._run.batch_script))
            if self._run.outcome() is not None or self._claims() != claims:  # the answer may have taken long
                return SOON_S
            if job_id:
                job = slurm.show_job(job_id)
                # An earlier job of the run, which a lost node delays. It may have ended since squeue's answer.
                if job is not None and (job.state == "COMPLETING" or (not job.live and started(self._run, job_id))):
                    return self._say(f"{ended}. Waiting until job {job_id} has left its nodes")
                submitted(self._run, job_id)
                return self._say(f"{ended}. Job {job_id}, which was not recorded, continues the run")
            return self._submit(ended)

    def _submit(self, ended: str) -> float:
        usable = partial(slurm.usable_nodes, self._job.partition)
        nodes = node_memory.left_out(self._run, self._job, usable, time.time())
        new = slurm.submit(self._run.batch_script, *exclusion.option(self._job.exclude, nodes))
        submitted(self._run, new)
        return self._say(f"{ended}. Resubmitted as job {new}")

    def _say(self, words: str, most_s: float = IMMINENT_S) -> float:
        if words != self._words:
            show(f"{self._run.path.name}: {words}")
        self._words = words
        return most_s


def _is_stuck(events: Sequence[Mapping[str, Any]], started: Mapping[str, Any], job: JobInfo) -> bool:
    """Whether the newest attempt, which this job ``started``, could not continue the run: Slurm refused the next job,
    or did not say why this one ended, and it was preempted."""
    newest = max(event["attempt"] for event in events)
    ends = [event for event in events if event["event"] == "stopped" and event["attempt"] == newest]
    if not ends or started["attempt"] != newest:
        return False
    unexplained = ends[-1].get("cause") in (Cause.UNKNOWN.value, Cause.ENDED_OTHERWISE.value)
    return "refused" in ends[-1] or (unexplained and job.preempt_time is not None)


def _was_killed(events: Sequence[Mapping[str, Any]], attempt: int) -> bool:
    """Whether the supervisor of this attempt, the newest, was killed, and another job may get further: not if that of
    the attempt before was killed, too, and this one has saved nothing."""
    own, before = ([event for event in events if event["attempt"] == number] for number in (attempt, attempt - 1))
    if any(event["attempt"] > attempt for event in events) or _has_end(own):
        return False
    saved = any(event["event"] in ("checkpoint", *SAVED_ITSELF) for event in own)
    return saved or not before or _has_end(before)


def _has_end(events: Iterable[Mapping[str, Any]]) -> bool:
    return any(event["event"] in (*ATTEMPT_ENDS, *RUN_ENDS) for event in events)


def _look(resubmitter: Resubmitter, alone: bool) -> None:
    """Gives up a run whose records cannot be read, or that belongs to another user, and waits for the others."""
    try:
        resubmitter.look()
    except (ClusterddpError, OSError) as error:
        if alone:
            raise
        resubmitter.give_up(what_failed(error))


def _show(progress: Progress) -> None:
    """Updates the progress. A disk error is retried at the next look."""
    try:
        progress.update()
    except OSError as error:
        if error.errno in LASTING:
            raise


def wait_and_resubmit(runs: list[RunDirectory], follow: bool = False) -> int:
    """Waits until all runs are over, and returns 0 if all completed. ``follow`` also shows rank 0's output."""
    jobs = [load_resolved(run.job_file) for run in runs]
    resubmitters = [Resubmitter(run, job) for run, job in zip(runs, jobs, strict=True)]
    for run in runs:
        with suppress(RunDirectoryError, OSError):  # which the first look reports
            if outcome := run.outcome():
                show(over_already(run, outcome))
    with ExitStack() as stack:
        shown = [
            stack.enter_context(
                Progress(
                    run,
                    job.steps,
                    job.progress_interval,
                    Shown(bar=len(runs) == 1, output=follow, label=f"{run.path.name}: " if len(runs) > 1 else ""),
                )
            )
            for run, job in zip(runs, jobs, strict=True)
        ]
        try:
            while any(resubmitter.result is None for resubmitter in resubmitters):
                for resubmitter, progress in zip(resubmitters, shown, strict=True):
                    if resubmitter.result is None:
                        _look(resubmitter, alone=len(runs) == 1)
                    _show(progress)
                time.sleep(LOOK_S)
        except KeyboardInterrupt:
            for resubmitter in resubmitters:
                resubmitter.leave()
            return INTERRUPTED
    results = {resubmitter.result for resubmitter in resubmitters}
    return next((code for code in (FAILED, UNCONFIRMED) if code in results), 0)


#: Seconds between two looks at the runs' files.
WAIT_LOOK_S = 1.0
#: Seconds for which a run without an outcome must be stopped, or unknown, to have ended. A job may be submitted, or an
#: outcome be written, between a look at the files and the controller's answer, and the controller may be restarting.
END_SETTLE_S, UNKNOWN_S = 3.0, 300.0
_CONTINUES = ("pending", "held", "running")


class _Wait:
    """A run that is waited for."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.activity = Activity(run)
        #: How it ended: completed, or a key of WAITED. None until then.
        self.end: str | None = None
        #: Its state if that may be an end, and the time since then.
        self._doubt: tuple[str, float] | None = None
        #: Who may have trained it when the controller was asked.
        self.claims: tuple[Mapping[str, Any], ...] = ()

    @property
    def about_to_end(self) -> bool:
        """Whether the controller's next answer may end the wait."""
        return self.end is None and self._doubt is not None and self._doubt[0] != "unknown"

    @property
    def in_doubt(self) -> bool:
        """Whether the run is not known to continue."""
        return self._doubt is not None

    def newly_unknown(self, state: RunState) -> bool:
        """Whether the run's state is unknown, and was not at the last look."""
        return state.word == "unknown" and (self._doubt is None or self._doubt[0] != "unknown")

    def look(self) -> None:
        """Reads the run's outcome."""
        with suppress(RunDirectoryError, OSError):  # then its state is unknown
            if (outcome := self.run.outcome()) is not None:
                self._ended("unconfirmed" if is_unconfirmed(outcome) else outcome["state"], how_it_ended(outcome))

    def update(self, state: RunState, now: float) -> None:
        """Takes the run's state at the time ``now``."""
        if state.word in _CONTINUES:
            self._doubt = None
        elif self._doubt is None or self._doubt[0] != state.word:
            self._doubt = (state.word, now)
        elif now - self._doubt[1] >= END_SETTLE_S and now - self._doubt[1] >= self._settle_s(state):
            self.look()  # the answer may have taken long
            if self.end is not None:
                return
            if summarize(self.run).claims != self.claims:  # the run was submitted again meanwhile
                self._doubt = None
                return
            deleted = state.word == "stopped" and not exists(self.run.path)
            word, reason = ("unknown", "its run directory was deleted") if deleted else (state.word, state.reason)
            self._ended(word, f"{word}: {reason}")

    def _settle_s(self, state: RunState) -> float:
        """Seconds for which the run must be in this state to have ended."""
        if state.word == "unknown":
            return UNKNOWN_S
        with suppress(RunDirectoryError, OSError):
            is_unread = state.word == "failed" and not state.log and not self.run.events()
            if is_unread or self.run.may_be_over(None if state.job is None else state.job.state):
                return HIDDEN_S
        return END_SETTLE_S

    def _ended(self, word: str, sentence: str) -> None:
        self.end = word
        show(f"{self.run}: {sentence}")


def wait(runs: Sequence[RunDirectory], timeout_s: float | None, for_any: bool) -> int:
    """Waits until all runs, or any of them, are over or stopped. Returns the exit code."""
    waits = [_Wait(run) for run in runs]
    enough = 1 if for_any else len(waits)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    pace = Pace()
    while True:
        for one in _left(waits):
            one.look()
        if len(waits) - len(_left(waits)) < enough and pace.due(tuple(one.activity.seen() for one in _left(waits))):
            left_s = TIMEOUT_S if deadline is None else deadline - time.monotonic()
            _ask(_left(waits), pace, min(TIMEOUT_S, max(WAIT_LOOK_S, left_s)))
            pace.asked(_longest_pause_s(_left(waits)))
        left = _left(waits)
        if len(waits) - len(left) >= enough:
            return _exit_code({one.end for one in waits})
        if deadline is not None and time.monotonic() >= deadline:
            names = ", ".join([*(one.run.path.name for one in left[:5]), *(["..."] if len(left) > 5 else [])])
            show(f"timed out: {len(left)} of {len(waits)} runs did not end ({names})")
            return TIMED_OUT
        time.sleep(WAIT_LOOK_S)


def _left(waits: Sequence[_Wait]) -> list[_Wait]:
    return [one for one in waits if one.end is None]


def _longest_pause_s(left: Sequence[_Wait]) -> float:
    """The longest pause until the controller is asked again."""
    if any(one.about_to_end for one in left):
        return WAIT_LOOK_S
    return SILENT_S if any(one.activity.silent or one.in_doubt for one in left) else QUIET_S


def _ask(left: Sequence[_Wait], pace: Pace, timeout_s: float) -> None:
    """Finds the states of the runs that have not ended, by at most one call of squeue for all."""
    summaries = [summarize(one.run) for one in left]
    states = run_states(summaries, timeout_s=timeout_s, queue=pace)
    for one, summary in zip(left, summaries, strict=True):
        one.claims = summary.claims
    now = time.monotonic()
    if doubts := [state.reason for one, state in zip(left, states, strict=True) if one.newly_unknown(state)]:
        show(f"the state of a run is unknown, retrying: {doubts[0]}")
    for one, state in zip(left, states, strict=True):
        one.update(state, now)


def _exit_code(ends: Collection[str | None]) -> int:
    """0 if all runs that ended completed, otherwise the code of the worst outcome."""
    return next((code for word, code in WAITED.items() if word in ends), 0)
