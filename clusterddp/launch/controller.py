"""Who starts a run again: Slurm's controller, or the loop of a local run. Two questions: why did it stop, and again."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from clusterddp.errors import LauncherEnvironmentError
from clusterddp.job import Job
from clusterddp.launch import site, slurm
from clusterddp.launch.cause import Cause, read_cause
from clusterddp.process import process_start
from clusterddp.rundir import RunDirectory, read_json, write_json

#: The exit code that asks the local loop for another attempt (EX_TEMPFAIL, sysexits.h).
AGAIN = 75


class Controller(Protocol):
    """What the supervisor needs of whoever started it. Questions raise SlurmError when there is no answer."""

    #: The exit code of an attempt that neither ended the run nor asked for another start.
    leave_code: int
    #: The exit code of an attempt that did ask.
    again_code: int

    def holder(self) -> dict[str, Any]:
        """What names this attempt's process in the run directory."""

    def describe(self) -> dict[str, Any]:
        """What the history says of this attempt's start."""

    def end_time(self) -> float | None:
        """When the job's time is over, in unix seconds; None for never."""

    def why(self) -> Cause:
        """Why the ranks were told to stop, if they were."""

    def ends_what_it_preempts(self) -> bool:
        """Whether a preempted job, left alone, never runs again."""

    def requeue(self) -> None:
        """Asks for another start of this job. The caller ends at once."""

    def resubmit(self) -> str:
        """Submits the run again, to start when this job is over; returns the new job's id."""


class SlurmController:
    """slurmctld, asked through scontrol about the job that this process is the batch step of."""

    leave_code = again_code = 0

    def __init__(self, environ: Mapping[str, str], run: RunDirectory, job: Job) -> None:
        job_id = slurm.own_job_id(environ)
        if job_id is None:
            raise LauncherEnvironmentError(
                "SLURM_JOB_ID is not set: this is the supervisor of a Slurm job. "
                "Submit with `clusterddp submit`, or `sbatch job.sbatch`"
            )
        self._run, self._job, self._job_id = run, job, job_id
        self._restarts = int(environ.get("SLURM_RESTART_COUNT", 0))
        self._nodes = environ.get("SLURM_JOB_NODELIST", "")

    def holder(self) -> dict[str, Any]:
        """The job, whose state the controller knows."""
        return {"kind": "slurm", "job": self._job_id}

    def describe(self) -> dict[str, Any]:
        """Job, restart count and nodes."""
        return {"job": self._job_id, "restarts": self._restarts, "nodes": self._nodes}

    def end_time(self) -> float | None:
        """EndTime as it stands now; an administrator may have moved it."""
        job = slurm.show_job(self._job_id)
        return job.end_time if job else None

    def why(self) -> Cause:
        """Reads the job's state and PreemptTime."""
        job = slurm.show_job(self._job_id)
        return read_cause(job, self._restarts, self._job.timeouts.notice_s, lambda: site.preemption(self._job).grace_s)

    def ends_what_it_preempts(self) -> bool:
        """PreemptMode=CANCEL."""
        return site.preemption(self._job).must_resubmit

    def requeue(self) -> None:
        """Slurm ends this process then, if it has not left before."""
        slurm.requeue(self._job_id)

    def resubmit(self) -> str:
        """The new job waits for the end of this one, and holds the run from now on."""
        new = slurm.submit(self._run.batch_script, f"--dependency=afterany:{self._job_id}")
        write_json(self._run.holder_file, {"kind": "slurm", "job": new}, mode=0o600)
        return new


class LocalController:
    """The loop of a local run. It says why in a file before it sends a signal, and starts again on exit code 75."""

    leave_code = 130
    again_code = AGAIN

    def __init__(self, run: RunDirectory) -> None:
        self._notice = notice_file(run)

    def holder(self) -> dict[str, Any]:
        """This process."""
        pid = os.getpid()
        return {"kind": "local", "host": socket.gethostname(), "pid": pid, "process_start": process_start(pid)}

    def describe(self) -> dict[str, Any]:
        """The process and its host."""
        return {"pid": os.getpid(), "nodes": socket.gethostname()}

    def end_time(self) -> float | None:
        """A local run has no time limit."""
        return None

    def why(self) -> Cause:
        """What the loop wrote, once."""
        notice = read_json(self._notice)
        self._notice.unlink(missing_ok=True)
        return Cause(notice["cause"]) if notice else Cause.NONE

    def ends_what_it_preempts(self) -> bool:
        """The loop starts again when asked."""
        return False

    def requeue(self) -> None:
        """The loop reads the exit code."""

    def resubmit(self) -> str:
        """There is no queue."""
        raise NotImplementedError("a local run is started again by its loop")


def notice_file(run: RunDirectory) -> Path:
    """Where the loop of a local run says why it sends a signal."""
    return run.private / "notice.json"


def give_notice(run: RunDirectory, cause: Cause) -> None:
    """Says why the ranks are about to be signalled. To be called before the signal is sent."""
    write_json(notice_file(run), {"cause": cause.value}, mode=0o600)
