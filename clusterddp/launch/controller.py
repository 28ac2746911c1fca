"""Who starts a run again: Slurm's controller, or the loop of a local run. Two questions: why did it stop, and again."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from clusterddp.errors import LauncherEnvironmentError, SlurmError
from clusterddp.launch import slurm
from clusterddp.launch.cause import Cause, read_cause
from clusterddp.process import process_start
from clusterddp.rundir import RunDirectory, read_json, write_json


class Controller(Protocol):
    """What the supervisor needs of whoever started it."""

    #: The exit code of an attempt that neither ended the run nor asked for another start.
    leave_code: int

    def holder(self) -> dict[str, Any]:
        """What names this attempt's process in the run directory."""

    def describe(self) -> dict[str, Any]:
        """What the history says of this attempt's start."""

    def why(self) -> Cause:
        """Why the ranks were told to stop, if they were."""

    def again(self) -> int:
        """Asks for another attempt; returns the exit code to end with, at once."""


class SlurmController:
    """slurmctld, asked through scontrol about the job that this process is the batch step of."""

    leave_code = 0

    def __init__(self, environ: Mapping[str, str], notice_s: float) -> None:
        job_id = slurm.own_job_id(environ)
        if job_id is None:
            raise LauncherEnvironmentError(
                "SLURM_JOB_ID is not set: this is the supervisor of a Slurm job. "
                "Submit with `clusterddp submit`, or `sbatch job.sbatch`"
            )
        self._job_id, self._notice_s = job_id, notice_s
        self._restarts = int(environ.get("SLURM_RESTART_COUNT", 0))
        self._nodes = environ.get("SLURM_JOB_NODELIST", "")

    def holder(self) -> dict[str, Any]:
        """The job, whose state the controller knows."""
        return {"kind": "slurm", "job": self._job_id}

    def describe(self) -> dict[str, Any]:
        """Job, restart count and nodes."""
        return {"job": self._job_id, "restarts": self._restarts, "nodes": self._nodes}

    def why(self) -> Cause:
        """Asks until there is an answer: nothing is ever requeued blind, and at the end of the grace we are killed."""
        pause_s = 0.5
        while True:
            try:
                job = slurm.show_job(self._job_id)
            except SlurmError as error:
                print(f"clusterddp: asking again in {pause_s:.0f} s: {error}", flush=True)
                time.sleep(pause_s)
                pause_s = min(30.0, 2 * pause_s)
                continue
            if job is not None and job.restarts != self._restarts:
                return Cause.REQUEUED_BY_SLURM
            return read_cause(job, self._notice_s)

    def again(self) -> int:
        """Requeues the job. Slurm ends this process then, if it has not left before."""
        slurm.requeue(self._job_id)
        return 0


class LocalController:
    """The loop of a local run. It says why in a file before it sends a signal, and starts again on exit code 75."""

    leave_code = 130

    def __init__(self, run: RunDirectory) -> None:
        self._notice = notice_file(run)

    def holder(self) -> dict[str, Any]:
        """This process."""
        return local_holder(os.getpid())

    def describe(self) -> dict[str, Any]:
        """The process and its host."""
        return {"pid": os.getpid(), "nodes": socket.gethostname()}

    def why(self) -> Cause:
        """What the loop wrote, once."""
        notice = read_json(self._notice)
        self._notice.unlink(missing_ok=True)
        return Cause(notice["cause"]) if notice else Cause.NONE

    def again(self) -> int:
        """The loop reads the exit code."""
        return 75


def notice_file(run: RunDirectory) -> Path:
    """Where the loop of a local run says why it sends a signal."""
    return run.private / "notice.json"


def give_notice(run: RunDirectory, cause: Cause) -> None:
    """Says why the ranks are about to be signalled. To be called before the signal is sent."""
    write_json(notice_file(run), {"cause": cause.value}, mode=0o600)


def local_holder(pid: int) -> dict[str, Any]:
    """A process that holds a run: its start time tells it from a later one with the same number."""
    return {"kind": "local", "host": socket.gethostname(), "pid": pid, "process_start": process_start(pid)}
