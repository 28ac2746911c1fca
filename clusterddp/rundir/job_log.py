"""The log of a job, and how the job ended if only its log says so.

``logs/job-N.log`` has the output of Slurm, the batch script and the supervisor.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from clusterddp.rundir.claims import Claim, JobClaim, taken_over
from clusterddp.rundir.files import open_binary
from clusterddp.rundir.run_directory import RunDirectory

#: The most bytes and lines that are read at the end of a log.
_BYTES, _LINES = 1 << 14, 10
#: States of jobs that ended by themselves. Others were ended by a scancel, a lost node, a preemption.
ENDED_BY_ITSELF = ("COMPLETED", "FAILED", "OUT_OF_MEMORY")


def job_log(run: RunDirectory, job_id: str) -> Path:
    """The log of a job."""
    return run.logs / f"job-{job_id}.log"


@dataclass(frozen=True)
class EarlyEnd:
    """The end of a job before its supervisor took the run over: ``reason``, and the last lines of its log."""

    reason: str
    lines: tuple[str, ...]


def early_end(run: RunDirectory, claim: Claim | None, state: str | None) -> EarlyEnd | None:
    """How a job ended that never started the supervisor. None if it did, or was ended from outside.

    ``claim``: the newest of the run, which is that of a submission until the supervisor has taken it over. ``state``:
    how the job ended, None if Slurm has forgotten it.
    """
    if not isinstance(claim, JobClaim) or claim.time is None:  # no submission's
        return None
    if state not in (None, *ENDED_BY_ITSELF) or taken_over(run, claim):
        return None
    log = job_log(run, claim.job)
    lines = _last_lines(log)
    if state is None and not lines:
        return None
    ended = f"job {claim.job} ended{f' ({state})' if state else ''} before it started the supervisor"
    if lines:
        return EarlyEnd(f"{ended}: {lines[-1]}", lines)
    return EarlyEnd(f"{ended}, and wrote no log. Check that its nodes can access {run}", ())


def unrecorded_end(run: RunDirectory, job_id: str, state: str | None) -> EarlyEnd:
    """How a job ended whose supervisor was killed, or could not continue the run, before it recorded why."""
    lines = _last_lines(job_log(run, job_id))
    ended = f"job {job_id} ended{f' ({state})' if state else ''}"
    return EarlyEnd(f"{ended}. Its log ends with: {lines[-1]}" if lines else f"{ended} without recording why", lines)


def _last_lines(path: Path) -> tuple[str, ...]:
    """The last lines of a log that are not empty. Empty if it cannot be read."""
    try:
        with open_binary(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ()
    return tuple(line.rstrip() for line in text.splitlines() if line.strip())[-_LINES:]
