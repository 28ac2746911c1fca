"""Why did the ranks stop? One question to the controller, and what follows from the answer.

Preemption, time limit and scancel all reach the ranks as the same TERM. Only the controller knows which it was, and
only while the job is in that state; what its words mean was seen on Slurm 22.05.8 and 24.11.5:

    JobState     PreemptTime   what it is
    RUNNING      a time        a preemption's grace time runs; the job will not run again unless it is requeued
    COMPLETING   a time        a preemption without grace: Slurm is requeueing the job already
    COMPLETING   None          scancel, or the time limit when EndTime is reached
    RUNNING      None          no one ends the job: a time-limit warning (near EndTime), or a signal from somewhere
"""

from __future__ import annotations

import enum
import time

from clusterddp.launch.slurm import JobInfo


class Cause(enum.Enum):
    """Why ranks were told to stop. The value is the word for it in the history."""

    PREEMPTED = "preempted"
    REQUEUED_BY_SLURM = "preempted without grace"
    TIME_LIMIT = "time limit near"
    TIMED_OUT = "time limit reached"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"
    NONE = "no one asked for it"

    @property
    def calls_for_requeue(self) -> bool:
        """Whether the job runs on only if the supervisor requeues it."""
        return self in (Cause.PREEMPTED, Cause.TIME_LIMIT)


def read_cause(job: JobInfo | None, notice_s: float, now: float | None = None) -> Cause:
    """The cause that the controller's record of the own job shows.

    ``notice_s``: how many seconds before EndTime the time-limit warning is due. Slurm sends it up to 60 s early.
    """
    now = time.time() if now is None else now
    if job is None or job.state == "CANCELLED":
        return Cause.CANCELLED
    time_left = float("inf") if job.end_time is None else job.end_time - now
    if job.state == "RUNNING":
        if job.preempt_time is not None:
            return Cause.PREEMPTED
        return Cause.TIME_LIMIT if time_left <= notice_s + 70 else Cause.NONE
    if job.preempt_time is not None or job.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD"):
        return Cause.REQUEUED_BY_SLURM
    return Cause.TIMED_OUT if job.state == "TIMEOUT" else Cause.CANCELLED
