"""The state of runs in a word and a reason: from their own records and one call of squeue for all of them.

``Cause`` is why the ranks were stopped, from the controller's record of the job. Preemption, time limit and scancel all
reach the ranks as the same TERM. Only the controller knows which it was, and only while the job is in that state (seen
on Slurm 22.05.8 and 24.11.5):

    JobState     PreemptTime   meaning
    RUNNING      a time        a preemption's grace period. The job will not run again unless it is requeued
    COMPLETING   a time        a preemption without grace, or after its grace, which the time limit may shorten: Slurm
                               is already requeueing or cancelling the job. Within the grace, scancel
    COMPLETING   None          scancel, or the time limit if it has passed. With more restarts than the attempt's, a
                               requeue: a preemption without grace, or `scontrol requeue`
    RUNNING      None          the job continues: a time-limit warning (near EndTime), or a signal from elsewhere
"""

from __future__ import annotations

import enum
import os
import shlex
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from clusterddp.errors import SlurmError
from clusterddp.rundir.claims import JobClaim, ProcessClaim, on_this_machine, process_alive
from clusterddp.rundir.job_log import ENDED_BY_ITSELF, early_end, unrecorded_end
from clusterddp.rundir.run_directory import as_typed
from clusterddp.rundir.summary import Summary
from clusterddp.slurm import commands as slurm
from clusterddp.slurm.commands import JobInfo
from clusterddp.slurm.polling import Pace, PacedQueue
from clusterddp.slurm.queue import QueuedJob, is_hold, queued_jobs, why_waiting

#: States of a job that has its nodes. CONFIGURING lasts for seconds after the ranks have started (seen on 22.05.8).
ACTIVE = ("RUNNING", "CONFIGURING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT")
#: Slurm's --signal comes up to 60 s early, and Slurm's times are whole seconds.
EARLY_S = 62


class Cause(enum.Enum):
    """Why the ranks were stopped. The value is the reason in the history."""

    PREEMPTED = "preempted"
    PREEMPTED_WITHOUT_GRACE = "preempted without grace"
    REQUEUED = "requeued, by `scontrol requeue` or because a node failed"
    TIME_LIMIT = "stopped before the time limit"
    TIMED_OUT = "time limit reached"
    CANCELLED = "cancelled"
    ENDED_IN_GRACE = "ended within the grace period of a preemption, probably by scancel"
    ENDED_OTHERWISE = "the job ended, but not by preemption, time limit or scancel"
    INTERRUPTED = "interrupted"
    STOP_REQUESTED = "stopped by `clusterddp stop`"
    REQUEUE_REQUESTED = "stopped by `clusterddp requeue`"
    DRAIN_REQUESTED = "stopped by `clusterddp drain`"
    NODES_BUSY = "no rank could start, because an earlier step of the job still holds its nodes"
    GPU_HOURS = "limits.gpu_hours reached. Raise it with --change --set limits.gpu_hours=N"
    BY_SCRIPT = "stopped by the script"
    SUPERSEDED = "superseded"
    UNKNOWN = "stopped, cause unknown"
    NONE = "stopped by a signal, but not by preemption, time limit or cancellation"


def read_cause(job: JobInfo | None, restarts: int, notice_s: float, grace_s: Callable[[], float], now: float) -> Cause:
    """The cause, from the controller's record of this job.

    ``restarts``: those of the calling attempt. A record with more describes a later start of the job. ``notice_s``:
    seconds before EndTime at which the ranks stop. ``grace_s``: the grace period of a preemption, infinite without one.
    It is called only if it matters.
    """
    if job is None:
        return Cause.UNKNOWN
    if job.restarts != restarts or job.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD"):
        # The record of a job that is requeued does not say why. A preemption would have been announced by its grace.
        return Cause.REQUEUED if grace_s() > 0 else Cause.PREEMPTED_WITHOUT_GRACE
    if job.state in ACTIVE:
        if job.preempt_time is not None:
            return Cause.PREEMPTED
        time_left = float("inf") if job.end_time is None else job.end_time - now
        return Cause.TIME_LIMIT if time_left <= notice_s + EARLY_S else Cause.NONE
    if job.preempt_time is not None and job.state == "COMPLETING":
        # Slurm ends a grace period late, never early, apart from the time limit. Its times are whole seconds. The
        # record of a completing job has the time at which Slurm began to end it. This process may ask much later.
        ended = now if job.end_time is None else job.end_time
        early = ended < job.preempt_time + grace_s() - 1 and not job.ran_out
        return Cause.ENDED_IN_GRACE if early else Cause.PREEMPTED_WITHOUT_GRACE
    if job.state == "CANCELLED":
        return Cause.CANCELLED
    if job.state == "TIMEOUT" or job.ran_out:
        return Cause.TIMED_OUT
    by_hand = job.state == "COMPLETING" and job.reason in ("None", "")
    return Cause.CANCELLED if by_hand else Cause.ENDED_OTHERWISE


#: The run is over.
OVER = ("completed", "failed", "cancelled")
#: held: waits for the hold after a requeue, or its owner's or administrator's. pending: waits in the queue. stopped:
#: until its user continues it. unknown: not visible from here.
WORDS = (*OVER, "pending", "held", "running", "stopped", "unknown")

_OTHERS = "only its owner can see which job or process trains it"


@dataclass(frozen=True)
class RunState:
    """A run's state: one of WORDS, why it is in it, and where."""

    word: str
    reason: str
    job_id: str | None = None
    nodes: str = ""
    remedy: str = ""
    """What a user can do about a run that waits."""
    job: QueuedJob | None = None
    """Slurm's record of the newest job, if it has one."""
    by_user: bool = False
    """Whether the run is stopped because its user asked for that."""
    log: tuple[str, ...] = ()
    """The end of the log of a job that did not record why it ended. Its last line is in ``reason``, too."""


def run_states(
    summaries: Sequence[Summary],
    patience_s: float = 0.0,
    timeout_s: float = slurm.TIMEOUT_S,
    queue: PacedQueue | Pace | None = None,
) -> list[RunState]:
    """The state of each run. Calls squeue once, and not at all if no run can have a job.

    ``patience_s``: seconds for which to retry a controller that does not answer. ``timeout_s``: for each answer.
    ``queue``: that of a command which asks repeatedly. It decides whether to call squeue, and is not retried without an
    answer.
    """
    cluster = slurm.cluster_name(os.environ)
    ids = {claim.job for summary in summaries for claim in _jobs(summary) if claim.may_be_of(cluster)}
    jobs: Mapping[str, QueuedJob] = {}
    away = ""
    try:
        if queue is not None and ids:
            jobs = queue.jobs(tuple(map(_recorded, summaries)), ids, timeout_s)
        elif ids:
            jobs = slurm.patiently(lambda: queued_jobs(ids, timeout_s), patience_s)
    except SlurmError as error:
        away = str(error)
    return [_state(summary, jobs, away, cluster) for summary in summaries]


def _recorded(summary: Summary) -> Hashable:
    """What a run's files show of its attempts."""
    return str(summary.run), summary.attempts, len(summary.ends), summary.outcome is None, summary.begun


def _jobs(summary: Summary) -> Iterable[JobClaim]:
    """The jobs that may still train the run or submit its next job."""
    if summary.outcome:
        return ()
    claims = (*summary.claims, summary.released)
    return (claim for claim in claims if isinstance(claim, JobClaim))


def _state(summary: Summary, jobs: Mapping[str, QueuedJob], away: str, cluster: str | None) -> RunState:
    if summary.outcome is not None:
        word = summary.outcome.state
        return RunState(word if word in OVER else "unknown", summary.outcome.reason, summary.job_id, summary.nodes)
    if summary.error:
        return RunState("unknown", summary.error, summary.job_id)
    for claim in summary.claims:
        if isinstance(claim, JobClaim):
            state = _of_job(summary, claim, jobs, away, cluster)
        else:
            state = _of_process(summary, claim)
        if state is not None:
            return state
    if summary.released and summary.released.may_be_of(cluster):
        state = _of_job(summary, summary.released, jobs, away, cluster)
        if state is not None:
            return replace(state, reason="submitting the next job") if state.word == "running" else state
    if not summary.readable:
        return RunState("unknown", _OTHERS, summary.job_id)
    job = jobs.get(summary.job_id or "")
    if summary.cancelled:
        return RunState("cancelled", "cancelled", summary.job_id, job=job)
    newest = summary.claims[0] if summary.claims else None
    if early := early_end(summary.run, newest, None if job is None else job.state):
        return RunState("failed", early.reason, summary.job_id, job=job, log=early.lines)
    if not summary.stopped and summary.job_id and (job is None or job.state in ENDED_BY_ITSELF):
        unrecorded = unrecorded_end(summary.run, summary.job_id, None if job is None else job.state)
        if job is not None or unrecorded.lines:
            return RunState("stopped", unrecorded.reason, summary.job_id, job=job, log=unrecorded.lines)
    return RunState("stopped", _why_stopped(summary, job), summary.job_id, job=job, by_user=_user_stopped(summary))


def _of_job(
    summary: Summary, claim: JobClaim, jobs: Mapping[str, QueuedJob], away: str, cluster: str | None
) -> RunState | None:
    """The state of a run that a job may train, or None if the job has ended."""
    job_id = claim.job
    if not claim.may_be_of(cluster):
        return RunState("unknown", f"job {job_id} of cluster {claim.cluster} cannot be reached from here", job_id)
    if away:
        return RunState("unknown", f"Slurm controller unreachable: {away}", job_id)
    job = jobs.get(job_id)
    if job is None or not job.live:
        return None
    if job.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"):
        begun = summary.begun and job_id == summary.job_id
        why = why_waiting(job, begun, shlex.quote(as_typed(summary.run.path)))
        word = "held" if is_hold(job, begun) else "pending"
        return RunState(word, why.words, job_id, remedy=why.remedy, job=job)
    # CONFIGURING: the ranks already run, for seconds (seen on 22.05.8).
    reason = "" if job.state in ("RUNNING", "CONFIGURING") else job.state.lower()
    return RunState("running", reason, job_id, job.nodes or summary.nodes, job=job)


def _of_process(summary: Summary, claim: ProcessClaim) -> RunState | None:
    """The state of a run that a local process may train, or None if the process has ended."""
    if not on_this_machine(claim):
        where = f"process {claim.pid} on {claim.host}, which cannot be reached from here"
        return RunState("unknown", where, nodes=claim.host)
    if not process_alive(claim):
        return None
    between = "between two attempts" if summary.attempts else "starting"
    words = f"local run, {between}" if claim.loop else f"process {claim.pid} on this machine"
    return RunState("running", words, nodes=summary.nodes)


def _user_stopped(summary: Summary) -> bool:
    """Whether the run's last attempt ended because its user stopped it."""
    return summary.cause == Cause.STOP_REQUESTED.value


def _why_stopped(summary: Summary, job: QueuedJob | None) -> str:
    """How the run's last job or attempt ended. The user's own request takes precedence over Slurm's record."""
    if _user_stopped(summary):
        return Cause.STOP_REQUESTED.value
    if job is not None and not job.live:
        return f"job {job.job_id} ended: {job.state}"
    if summary.ends:
        return summary.ends[-1]
    return "its last attempt ended without a record" if summary.attempts else "not started"
