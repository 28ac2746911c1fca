"""Slurm's controller, or the loop of a local run: why the ranks were stopped, and starting the run again."""

from __future__ import annotations

import enum
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from clusterddp.errors import INTERRUPTED, STOPPED, LauncherEnvironmentError, SlurmError
from clusterddp.failures import exclusion
from clusterddp.hostlist import expand
from clusterddp.jobdef.job import Job
from clusterddp.reporter import say
from clusterddp.rundir.files import write_json
from clusterddp.rundir.records import is_text, read_json
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm import commands as slurm
from clusterddp.slurm import preemption_policy
from clusterddp.slurm.cause import Cause, read_cause
from clusterddp.supervisor import lease


class Stop(enum.Enum):
    """Why ranks are told to stop; the value is what they and the history call it."""

    PREEMPTION = "preemption"
    TIME_LIMIT = "time limit"
    JOB_END = "end of the job"
    INTERRUPTION = "interruption"


@dataclass(frozen=True)
class Notice:
    """What is ahead of a job: ``end_time`` in unix seconds (None: no limit), and why it is to stop now, if it is."""

    end_time: float | None
    stop: Stop | None = None


class Controller(Protocol):
    """What the supervisor needs of whoever started it. Questions raise SlurmError when there is no answer."""

    #: The exit code of an attempt that neither ended the run nor asked for another start.
    leave_code: int
    #: The exit code of an attempt that did ask.
    again_code: int
    #: Whether a run can go on in another job.
    resubmits: bool
    #: Whether it starts a run again at all.
    starts_again: bool

    def holder(self) -> dict[str, Any]:
        """What names this attempt's process in the run directory."""

    def describe(self) -> dict[str, Any]:
        """What the history says of this attempt's start."""

    def notice(self) -> Notice:
        """What is ahead of the job, as it stands now."""

    def why(self, notice_s: float) -> Cause:
        """Why the ranks were told to stop, if they were; ``notice_s`` before the time limit they are."""

    def term_notice_s(self) -> float | None:
        """How long ranks have from a TERM to a KILL; None: nobody says."""

    def ends_what_it_preempts(self) -> bool:
        """Whether a preempted job, left alone, never runs again."""

    def requeue(self) -> None:
        """Asks for another start of this job. The caller ends at once."""

    def usable_nodes(self) -> list[str]:
        """The nodes that the job could be given, busy ones included."""

    def resubmit(self, without: Sequence[str] = (), after_this: bool = True) -> str:
        """Submits the run again, ``without`` some nodes, to start when this job is over; returns the new job's id."""


class SlurmController:
    """slurmctld, asked through scontrol about the job that this process is the batch step of."""

    leave_code = again_code = 0
    resubmits = starts_again = True

    def __init__(self, environ: Mapping[str, str], run: RunDirectory, job: Job) -> None:
        job_id = slurm.own_job_id(environ)
        if job_id is None:
            raise LauncherEnvironmentError(
                "SLURM_JOB_ID is not set: this is the supervisor of a Slurm job. "
                "Submit with `clusterddp submit`, or `sbatch job.sbatch`"
            )
        self._run, self._job_id = run, job_id
        self._restarts = int(environ.get("SLURM_RESTART_COUNT", 0))
        self._nodes = environ.get("SLURM_JOB_NODELIST", "")
        # What the job got, which SBATCH_PARTITION or an administrator may have made another than was asked for.
        self._partition = environ.get("SLURM_JOB_PARTITION") or job.partition
        self._qos = environ.get("SLURM_JOB_QOS") or job.qos
        self._exclude = job.exclude

    def holder(self) -> dict[str, Any]:
        """The job, whose state the controller knows."""
        return lease.of_job(self._job_id)

    def describe(self) -> dict[str, Any]:
        """Job, restart count and nodes."""
        return {"job": self._job_id, "restarts": self._restarts, "nodes": self._nodes}

    def notice(self) -> Notice:
        """EndTime, PreemptTime and the state; an administrator may have moved the first."""
        job = slurm.show_job(self._job_id)
        if job is None or job.restarts != self._restarts:
            return Notice(None)
        if job.preempt_time is not None:
            return Notice(job.end_time, Stop.PREEMPTION)
        return Notice(job.end_time, Stop.JOB_END if job.state == "COMPLETING" else None)

    def why(self, notice_s: float) -> Cause:
        """Reads the job's state and PreemptTime."""
        job = slurm.show_job(self._job_id)
        cause = read_cause(job, self._restarts, notice_s, lambda: self._preemption().grace_s)
        if cause in (Cause.UNKNOWN, Cause.ENDED_OTHERWISE, Cause.NONE):
            say(f"the controller says: {job}")
        return cause

    def term_notice_s(self) -> float | None:
        """The partition's or QOS's grace; KillWait where there is none."""
        return self._preemption().notice_s

    def ends_what_it_preempts(self) -> bool:
        """PreemptMode=CANCEL."""
        return self._preemption().must_resubmit

    def _preemption(self) -> preemption_policy.Preemption:
        return preemption_policy.preemption(self._partition, self._qos)

    def requeue(self) -> None:
        """Slurm ends this process then, if it has not left before."""
        slurm.requeue(self._job_id)

    def usable_nodes(self) -> list[str]:
        """Those of its partition that work, less those that the job definition excludes."""
        excluded = expand(self._exclude or "")
        return [node for node in slurm.usable_nodes(self._partition) if node not in excluded]

    def resubmit(self, without: Sequence[str] = (), after_this: bool = True) -> str:
        """The new job holds the run from now on, and waits for the end of this one unless told otherwise.

        This one must not come back, unless there is no new one: Slurm 24.11 requeues by itself what leaves within a
        grace.
        """
        if not self._run.batch_script.exists():
            raise SlurmError(f"{self._run.batch_script} is missing, which a resubmission needs")
        with suppress(SlurmError):  # refused where the job is ending already, and comes back no more
            slurm.forbid_requeue(self._job_id)
        dependency = [f"--dependency=afterany:{self._job_id}"] if after_this else []
        try:
            new = slurm.submit(self._run.batch_script, *dependency, *exclusion.option(self._exclude, without))
        except SlurmError:
            with suppress(SlurmError):
                slurm.allow_requeue(self._job_id)
            raise
        lease.submitted(self._run, new)
        return new


class AllocationController(SlurmController):
    """The same for an allocation of one's own (salloc), which Slurm never starts again, and clusterddp neither."""

    leave_code = INTERRUPTED
    starts_again = False

    def notice(self) -> Notice:
        """What whoever waits wrote before it sent a signal, else what slurmctld knows."""
        said = _stop_said(notice_file(self._run))
        return Notice(None, said) if said else super().notice()

    def why(self, notice_s: float) -> Cause:
        """The same, of the cause."""
        notice = read_json(notice_file(self._run))
        return Cause(notice["cause"]) if notice else super().why(notice_s)

    def ends_what_it_preempts(self) -> bool:
        """Slurm requeues batch jobs only."""
        return True


class LocalController:
    """The loop of a local run. It says why in a file before it sends a signal, and restarts on exit code 75."""

    leave_code = INTERRUPTED
    again_code = STOPPED
    resubmits = False
    starts_again = True

    def __init__(self, run: RunDirectory) -> None:
        self._notice = notice_file(run)

    def holder(self) -> dict[str, Any]:
        """This process."""
        return lease.of_this_process()

    def describe(self) -> dict[str, Any]:
        """The process and its host."""
        return {"pid": os.getpid(), "nodes": socket.gethostname()}

    def notice(self) -> Notice:
        """A local run has no time limit; the loop has said what else before it signalled the ranks."""
        return Notice(None, _stop_said(self._notice))

    def why(self, notice_s: float) -> Cause:
        """What the loop wrote before it sent the signal."""
        del notice_s
        notice = read_json(self._notice, {"cause": lambda cause: cause in [known.value for known in Cause]})
        return Cause(notice["cause"]) if notice else Cause.NONE

    def term_notice_s(self) -> float | None:
        """The loop never sends a KILL by itself."""
        return None

    def ends_what_it_preempts(self) -> bool:
        """The loop starts again when asked."""
        return False

    def requeue(self) -> None:
        """The loop reads the exit code."""

    def usable_nodes(self) -> list[str]:
        """There is this machine alone."""
        return []

    def resubmit(self, without: Sequence[str] = (), after_this: bool = True) -> str:
        """There is no queue."""
        raise NotImplementedError("a local run is started again by its loop")


def notice_file(run: RunDirectory) -> Path:
    """Where the loop of a local run says why it sends a signal."""
    return run.private / "notice.json"


def _stop_said(notice: Path) -> Stop | None:
    cause = (read_json(notice, {"cause": is_text}) or {}).get("cause")
    return {Cause.PREEMPTED.value: Stop.PREEMPTION, Cause.INTERRUPTED.value: Stop.INTERRUPTION}.get(str(cause))


def give_notice(run: RunDirectory, cause: Cause) -> None:
    """Says why the ranks are about to be signalled. To be called before the signal is sent."""
    write_json(notice_file(run), {"cause": cause.value}, mode=0o600)
