"""Why the ranks were stopped, from the controller's record of the job.

Preemption, time limit and scancel all reach the ranks as the same TERM. Only the controller knows which it was, and
only while the job is in that state (seen on Slurm 22.05.8 and 24.11.5):

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
from collections.abc import Callable

from clusterddp.slurm.commands import JobInfo

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
    STOP_REQUESTED = "stopped by `clusterddp tell stop`"
    REQUEUE_REQUESTED = "stopped by `clusterddp requeue`"
    DRAIN_REQUESTED = "stopped by `clusterddp tell drain`"
    SLOW_NODE = "stopped to leave a slow node"
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
        # Slurm ends a grace period late, never early, apart from the time limit. Its times are whole seconds.
        early = now < job.preempt_time + grace_s() - 1 and not job.ran_out
        return Cause.ENDED_IN_GRACE if early else Cause.PREEMPTED_WITHOUT_GRACE
    if job.state == "TIMEOUT" or job.ran_out:
        return Cause.TIMED_OUT
    by_hand = job.state == "CANCELLED" or (job.state == "COMPLETING" and job.reason in ("None", ""))
    return Cause.CANCELLED if by_hand else Cause.ENDED_OTHERWISE
