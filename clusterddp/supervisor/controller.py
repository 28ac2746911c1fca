"""Slurm's controller, or the loop of a local run: why the ranks were stopped, requeue and resubmission.

``Monitor`` is a thread that looks for a newer attempt while the ranks train, and asks the controller when the job must
stop. The time limit is read from the job's EndTime as it stands now, because an administrator may change it and because
Slurm's own warning (``--signal``) comes once and up to 60 s early. A preemption is noticed here when its TERM reached
no rank: it began before the ranks' step existed, or the script changed what a signal does in its process.

A controller serves thousands of jobs. It is asked about once a minute in quiet times, and often at the start, after a
signal or a lost connection, and when it is nearly time to stop.
"""

from __future__ import annotations

import os
import queue
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from clusterddp.errors import (
    INTERRUPTED,
    STOPPED,
    LauncherEnvironmentError,
    RunDirectoryError,
    SlurmError,
    SlurmMissing,
    SlurmUnavailable,
)
from clusterddp.failures import exclusion, node_memory
from clusterddp.failures.placement import JobStart
from clusterddp.history.beginnings import Allocated
from clusterddp.hostlist import expand
from clusterddp.jobdef.job import Job
from clusterddp.process import descendants, started_at
from clusterddp.reporter import say
from clusterddp.rundir.claims import Claim
from clusterddp.rundir.files import exists, is_elsewhere, status, write_json
from clusterddp.rundir.records import read_json
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.schemas import is_text
from clusterddp.slurm import commands as slurm
from clusterddp.slurm import configuration, slurmd
from clusterddp.slurm.commands import JobInfo
from clusterddp.slurm.run_states import ACTIVE, Cause, read_cause
from clusterddp.supervisor import lease
from clusterddp.supervisor.attempt_state import ASK_S, ControllerFailed, Event, Notice, RunRemoved, Stop, Superseded


class Controller(Protocol):
    """What started the supervisor, and can start it again. Queries raise SlurmError if there is no answer."""

    #: The exit code of an attempt after which the run is neither over nor restarted.
    leave_code: int
    #: The exit code of an attempt after which the run is restarted.
    again_code: int
    #: Whether a run can continue in another job.
    resubmits: bool
    #: Whether it restarts a run at all.
    starts_again: bool
    #: Whether it serves many jobs, so that it must be asked rarely.
    busy: bool = True
    #: Whether a user sees what this process prints below what rank 0 has printed, as in a local run.
    output_above: bool = False

    def holder(self) -> Claim:
        """The claim of this attempt's job or process."""

    def submitted_at(self) -> float | None:
        """When this job was submitted or requeued. None if a user starts each attempt."""
        return None

    def describe(self) -> JobStart:
        """The job or process and its nodes."""

    def notice(self) -> Notice:
        """When the job ends, and whether it must stop now."""

    def why(self, notice_s: float) -> Cause:
        """Why the ranks were asked to stop, if they were. ``notice_s``: how long before the time limit that happens."""

    def term_notice_s(self) -> float | None:
        """Seconds from a TERM to the KILL. None if unknown."""
        return None

    def ends_what_it_preempts(self) -> bool:
        """Whether a preempted job does not run again unless it is resubmitted."""
        return False

    def unanswering(self, nodes: Sequence[str]) -> Sequence[str]:
        """Those of these nodes that certainly do not answer."""
        del nodes
        return ()

    def waits_for_nodes(self, launcher: int | None) -> bool | None:
        """Whether the launcher, by its pid, still waits for nodes of its job. None if that is unknown."""
        del launcher
        return False

    def requeue(self) -> None:
        """Requeues this job. The caller exits at once."""

    def hold(self) -> None:
        """Keeps Slurm from starting this job again by itself."""
        return

    def before_exit(self) -> None:
        """This process will exit with a code other than 0, and its job must end then."""
        return

    def usable_nodes(self) -> list[str]:
        """The nodes that the job could be given, busy ones included. Empty if it cannot be resubmitted."""
        return []

    def resubmit(self, without: Sequence[str] = (), after_this: bool = True) -> str:
        """Submits the run as a new job ``without`` some nodes, to start after this one. Returns the new job's id."""

    def successor(self) -> str | None:
        """The new job, if a submission that Slurm did not answer was carried out nevertheless."""
        return None


class SlurmController(Controller):
    """slurmctld, queried with scontrol about the job whose batch step this is."""

    leave_code = again_code = 0
    resubmits = True
    starts_again = True

    def __init__(self, environ: Mapping[str, str], run: RunDirectory, job: Job) -> None:
        job_id = slurm.own_job_id(environ)
        if job_id is None:
            raise LauncherEnvironmentError(
                "SLURM_JOB_ID is not set, but this supervisor runs only in a Slurm job. "
                "Submit with `clusterddp submit`, or `sbatch job.sbatch`"
            )
        self._run, self._job, self._job_id = run, job, job_id
        self.starts_again = self.starts_again and job.continues
        self._restarts = int(environ.get("SLURM_RESTART_COUNT", 0))
        self._nodes = environ.get("SLURM_JOB_NODELIST", "")
        # SBATCH_PARTITION or an administrator may have changed what the job definition asks for.
        self._partition = environ.get("SLURM_JOB_PARTITION") or job.partition
        self._qos = environ.get("SLURM_JOB_QOS") or job.qos
        self._policy: configuration.Preemption | None = None
        self._own_node = environ.get("SLURMD_NODENAME")
        self._step_job = environ.get("SLURM_JOB_ID", job_id)  # an array's task has its own id, by which steps go

    def holder(self) -> Claim:
        """The job, and how often Slurm had restarted it."""
        return replace(lease.of_job(self._job_id), restarts=self._restarts)

    def submitted_at(self) -> float | None:
        """Slurm's SubmitTime."""
        job = slurm.show_job(self._job_id)
        return None if job is None else job.submit_time

    def describe(self) -> JobStart:
        """Job, restart count and nodes."""
        return JobStart(self._nodes, job=self._job_id, restarts=self._restarts)

    def notice(self) -> Notice:
        """EndTime, which an administrator may change, PreemptTime and the state."""
        job = slurm.show_job(self._job_id)
        if job is None or job.restarts != self._restarts:
            return Notice(None)
        ends = Stop.JOB_END if job.state == "COMPLETING" else None
        left = frozenset(expand(job.nodes)) if self._job.outlives_nodes and ends is None and job.nodes else None
        stop = ends if job.preempt_time is None else Stop.PREEMPTION
        return Notice(job.end_time, stop, allocated(job, batch_step_began()), left)

    def why(self, notice_s: float) -> Cause:
        """Reads the job's state and PreemptTime."""
        job = slurm.show_job(self._job_id)
        cause = read_cause(job, self._restarts, notice_s, lambda: self._preemption().announced_s, time.time())
        if cause in (Cause.UNKNOWN, Cause.ENDED_OTHERWISE, Cause.NONE):
            say(f"Slurm's record of the job: {job}" if job else f"Slurm has no record of job {self._job_id}")
        return cause

    def term_notice_s(self) -> float | None:
        """The grace period of the partition or QOS, or KillWait if there is none."""
        self._policy = self._preemption()
        return self._policy.notice_s

    def ends_what_it_preempts(self) -> bool:
        """PreemptMode=CANCEL, as read at the start, because a preempting job waits meanwhile. Or ``--no-requeue``."""
        return not self._job.continues or (self._policy or self._preemption()).must_resubmit

    def unanswering(self, nodes: Sequence[str]) -> Sequence[str]:
        """Those whose slurmd does not answer. Never this node."""
        others = [node for node in nodes if node != self._own_node]
        return slurmd.unanswering(others) if others else ()

    def waits_for_nodes(self, launcher: int | None) -> bool | None:
        """Whether slurmctld has no step for this srun yet, because nodes are busy.

        None if slurmctld does not know this srun: when it restarts, it forgets those that wait, and they ask again only
        after a minute or more (seen on 22.05.8). One that has asked twice is listed twice. A site's srun may be a
        script, and so a child of the launcher.
        """
        if launcher is None:
            return False
        own = {launcher, *descendants(launcher)}
        states = {state for pid, state in slurm.steps(self._step_job) if pid in own}
        return states == {"PENDING"} if states else None

    def _preemption(self) -> configuration.Preemption:
        return configuration.preemption(self._partition, self._qos)

    def requeue(self) -> None:
        """Slurm then ends this process, unless it exits first."""
        slurm.requeue(self._job_id)

    def hold(self) -> None:
        """Slurm 24.11 starts a job again that was requeued within an earlier grace period."""
        with suppress(SlurmError):  # `main.finished` keeps the run from starting, too
            slurm.set_requeue(self._job_id, allowed=False)

    def before_exit(self) -> None:
        """Slurm would requeue a job that was submitted with ``--requeue=expedite``, and hold it (seen on 26.05.5)."""
        if not self._job.expedite_requeue:
            return
        with suppress(SlurmError):
            job = slurm.show_job(self._job_id)
            if job is not None and job.state in ACTIVE and job.restarts == self._restarts:  # else it is being requeued
                slurm.set_requeue(self._job_id, allowed=False)

    def usable_nodes(self) -> list[str]:
        """The partition's working nodes without those that the job definition excludes."""
        excluded = expand(self._job.exclude or "")
        return [node for node in slurm.usable_nodes(self._partition) if node not in excluded]

    def resubmit(self, without: Sequence[str] = (), after_this: bool = True) -> str:
        """The new job holds the run from now on.

        This job must not be requeued once there is a new one: Slurm 24.11 requeues a job that exits within a grace
        period.
        """
        if not exists(self._run.batch_script):
            raise SlurmError(f"{self._run.batch_script} is missing, but a resubmission needs it")
        with suppress(SlurmError):  # refused if the job is ending already, and will not be requeued
            slurm.set_requeue(self._job_id, allowed=False)
        dependency = [f"--dependency=afterany:{self._job_id}"] if after_this else []
        try:
            remembered = node_memory.avoided(self._run, self._job, without, self.usable_nodes, time.time())
            options = exclusion.option(self._job.exclude, [*without, *remembered])
            new = slurm.submit(self._run.batch_script, *dependency, *options)
        except SlurmError as error:
            if not isinstance(error, SlurmUnavailable) or isinstance(error, SlurmMissing):
                with suppress(SlurmError):  # the caller may requeue the job instead
                    slurm.patiently(partial(slurm.set_requeue, self._job_id, allowed=True))
            raise
        self._record(new)
        return new

    def successor(self) -> str | None:
        """A different live job with the run's batch script."""
        new = slurm.jobs_by_script(ended=False, without=self._job_id).get(str(self._run.batch_script))
        if new is None or lease.started(self._run, new):  # an earlier job, which a lost node keeps in COMPLETING
            return None
        self._record(new)
        return new

    def _record(self, new: str) -> None:
        """Records that the new job holds the run, retrying while the disk fails."""
        try:
            slurm.patiently(partial(lease.submitted, self._run, new), errors=(OSError,))
        except OSError as error:
            say(f"could not record job {new} ({error.strerror}). Until it starts, the run is shown as stopped")


class AllocationController(SlurmController):
    """The same for a user's own allocation (salloc), which is never restarted."""

    leave_code = INTERRUPTED
    starts_again = False

    def submitted_at(self) -> None:
        """Its user starts each attempt in it."""
        return

    def notice(self) -> Notice:
        """The file that ``submit --here`` wrote before it sent a signal, else slurmctld's answer."""
        said = _stop_said(self._run.notice_file)
        return Notice(None, said) if said else super().notice()

    def why(self, notice_s: float) -> Cause:
        """The same, for the cause."""
        notice = read_json(self._run.notice_file)
        return Cause(notice["cause"]) if notice else super().why(notice_s)

    def ends_what_it_preempts(self) -> bool:
        """Slurm requeues batch jobs only."""
        return True


class LocalController(Controller):
    """The loop of a local run. It writes the cause to a file before it sends a signal, and restarts on exit code 75.

    It never sends a KILL on its own.
    """

    leave_code = INTERRUPTED
    again_code = STOPPED
    busy = resubmits = False
    starts_again = True

    def __init__(self, run: RunDirectory) -> None:
        self._notice = run.notice_file

    def holder(self) -> Claim:
        """This process."""
        return lease.of_this_process()

    def describe(self) -> JobStart:
        """The process and its host."""
        return JobStart(socket.gethostname(), pid=os.getpid())

    def notice(self) -> Notice:
        """The loop's notice. A local run has no time limit."""
        return Notice(None, _stop_said(self._notice))

    def why(self, notice_s: float) -> Cause:
        """The cause in the loop's notice."""
        del notice_s
        notice = read_json(self._notice, {"cause": lambda cause: cause in [known.value for known in Cause]})
        return Cause(notice["cause"]) if notice else Cause.NONE

    def requeue(self) -> None:
        """The loop reads the exit code."""

    def resubmit(self, without: Sequence[str] = (), after_this: bool = True) -> str:
        """A local run has no queue."""
        raise NotImplementedError("a local run is restarted by its loop")


def batch_step_began() -> float:
    """When Slurm started the slurmstepd of this batch step. If that is not the parent: when this process started."""
    parent = os.getppid()
    with suppress(OSError):
        if Path(f"/proc/{parent}/comm").read_text(errors="replace").strip() == "slurmstepd":
            return started_at(parent) or time.time()
    return started_at(os.getpid()) or time.time()


def allocated(job: JobInfo, batch_step: float) -> Allocated | None:
    """When the job was queued, could start, and got its nodes, and how many tasks of its array may run at a time. None
    if the time at which it got them is unknown.

    Slurm's times are whole seconds: it got them before the batch step started, and within a second of StartTime.
    """
    if job.start_time is None:
        return None
    begun = min(max(job.start_time, batch_step), job.start_time + 1)
    limit = job.task_limit or None
    return Allocated(submitted=job.submit_time, eligible=job.eligible_time, begun=begun, limit=limit)


def _stop_said(notice: Path) -> Stop | None:
    cause = (read_json(notice, {"cause": is_text}) or {}).get("cause")
    return {Cause.PREEMPTED.value: Stop.PREEMPTION, Cause.INTERRUPTED.value: Stop.INTERRUPTION}.get(str(cause))


def give_notice(run: RunDirectory, cause: Cause) -> None:
    """Writes why the ranks are about to be signalled. To be called before the signal is sent.

    If that fails, as on a full disk, the signal must still be sent. The ranks then save, and the history lacks the
    cause.
    """
    try:
        write_json(run.notice_file, {"cause": cause.value}, mode=0o600)
    except OSError as error:
        say(f"could not write {run.notice_file} ({error.strerror}). The history will lack the reason for this stop")


#: The least and the most seconds between two questions in quiet times, so that those of many jobs spread out.
QUIET_S = (60.0, 75.0)


class Monitor:
    """Passes what it finds to ``post``, until it is closed or the attempt is superseded.

    ``margin_s``: how many seconds before the time limit the ranks must stop, at the moment. ``failed`` gets an
    error that ends the thread.
    """

    #: How often to look for a newer attempt, in seconds.
    look_s = 2.0
    #: How long the run directory must be missing, in seconds: a file server may have an outage.
    removed_s = 30.0
    #: Seconds after the start, or after ``ask``, during which the controller is asked every ``ask_s``.
    restless_s, ask_s = 30.0, ASK_S

    def __init__(
        self,
        controller: Controller,
        run: RunDirectory,
        attempt: int,
        post: Callable[[Event], None],
        margin_s: Callable[[], float],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._controller, self._run, self._attempt, self._post = controller, run, attempt, post
        self._margin_s, self._failed = margin_s, failed
        #: For how many seconds to ask often from now on. None: end.
        self._requests: queue.SimpleQueue[float | None] = queue.SimpleQueue()
        self._end_time: float | None = None
        self._failures = 0
        self._missing_since: float | None = None
        self._thread = threading.Thread(target=self._work, name="monitor", daemon=True)
        self._thread.start()

    def ask(self, often: bool = True) -> None:
        """Asks the controller now, and ``often`` for a while."""
        self._requests.put(self.restless_s if often else 0.0)

    def close(self) -> None:
        """Ends the thread, without waiting for a question that is under way."""
        self._requests.put(None)
        self._thread.join(timeout=0.1)

    def _work(self) -> None:
        try:
            self._watch()
        except BaseException as error:
            self._failed(error)

    def _watch(self) -> None:
        ask_at, restless_until = 0.0, time.monotonic() + self.restless_s
        while (found := self._look()) is None:
            if time.monotonic() >= ask_at:
                self._post(self._asked())
                ask_at = time.monotonic() + self._pause_s(restless=time.monotonic() < restless_until)
            with suppress(queue.Empty):
                if (restless_s := self._requests.get(timeout=self.look_s)) is None:
                    return
                ask_at, restless_until = 0.0, max(restless_until, time.monotonic() + restless_s)
        self._post(found)

    def _look(self) -> Superseded | RunRemoved | None:
        """Whether the run directory shows that the attempt must end, and why."""
        try:
            if self._run.superseded(self._attempt):
                return Superseded()
            own = (self._run.job_file, self._run.attempt_private(self._attempt))
            if not (is_elsewhere(self._run.path) or all(map(_missing, own))):
                self._missing_since = None
                return None
        except OSError as error:
            say(f"could not read the run directory ({error}). Training continues")
            return None
        now = time.monotonic()
        if self._missing_since is None:
            self._missing_since = now
        removed = now - self._missing_since >= self.removed_s
        return RunRemoved(f"{self._run} was removed, renamed or replaced") if removed else None

    def _asked(self) -> Event:
        try:
            notice = self._controller.notice()
        except (SlurmError, RunDirectoryError, OSError) as error:
            self._failures += 1
            if isinstance(error, SlurmMissing):  # whose remedy is about submissions
                return ControllerFailed(error.problem, missing=True)
            reachable = isinstance(error, SlurmError) and not isinstance(error, SlurmUnavailable)
            return ControllerFailed(str(error), reachable)
        self._failures, self._end_time = 0, notice.end_time
        return notice

    def _pause_s(self, restless: bool) -> float:
        if restless or not self._controller.busy:
            return self.ask_s
        return pause_s(
            None if self._end_time is None else self._end_time - self._margin_s() - time.time(), self._failures
        )


def pause_s(left_s: float | None, failures: int = 0) -> float:
    """How long until the next question to a controller that serves many jobs, in seconds.

    ``left_s``: until the ranks must stop before the time limit, None if there is none. An administrator may
    extend the limit up to then. ``failures``: how many questions in a row it has not answered.
    """
    if failures:
        return min(QUIET_S[0], ASK_S * 2.0 ** min(failures, 10))
    quiet = random.uniform(*QUIET_S)
    return quiet if left_s is None else min(quiet, max(ASK_S, left_s - 2 * ASK_S))


def _missing(path: Path) -> bool:
    """Whether a path does not exist. Raises OSError if that is unknown."""
    try:
        status(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    return False
