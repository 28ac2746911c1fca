"""A job that a command submits and waits for, such as that of ``doctor --nodes``; it belongs to no run."""

from __future__ import annotations

import time
from contextlib import suppress

from clusterddp.errors import SlurmError
from clusterddp.slurm import commands
from clusterddp.slurm.queue import QueuedJob, queued_jobs
from clusterddp.slurm.waiting import why_waiting

#: Timeout for a cancelled job to end, and the polling interval, in seconds.
END_S, ASK_S = 10.0, 0.5


def find(job_id: str) -> QueuedJob | None:
    """The job as squeue reports it; None if Slurm does not know it (any more). Raises SlurmError."""
    return queued_jobs([job_id]).get(job_id)


def progress(job: QueuedJob) -> str:
    """Why the job is pending, or on which nodes it runs; '' if Slurm does not report it yet."""
    if job.state == "PENDING":
        return f"waits: {why_waiting(job, begun=False).words}" if job.reason != "None" else ""
    return f"runs on {job.nodes}" if job.live and job.nodes else ""


def end(job_id: str) -> None:
    """Cancels the job unless it has ended, and waits up to END_S seconds until it has, and no longer writes files."""
    deadline = time.monotonic() + END_S
    with suppress(SlurmError):
        commands.cancel(job_id)
        while (job := commands.patiently(lambda: find(job_id))) and job.live and time.monotonic() < deadline:
            time.sleep(ASK_S)
