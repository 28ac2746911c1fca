"""``submit --check-resume N`` on a cluster: submits a job that makes the check, follows its log, says the result."""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from clusterddp.cli.local import interrupts_counted
from clusterddp.cli.progress import Tail
from clusterddp.cli.recording import recorded
from clusterddp.cli.resume_check.check import temporary_folder, without_side_effects
from clusterddp.cli.resume_check.result_file import read_result, write_steps
from clusterddp.cli.resume_check.trials import LATE_S, Interrupted, unfinished
from clusterddp.cli.submission import with_code
from clusterddp.errors import (
    INTERRUPTED,
    CheckUnfinished,
    ClusterddpError,
    NotRepeatable,
    ResumeDiffers,
    SlurmError,
    SlurmUnavailable,
)
from clusterddp.jobdef.job import Job
from clusterddp.process import signals_blocked
from clusterddp.reporter import say, show
from clusterddp.rundir.files import write_atomically
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm import awaited_job, resources
from clusterddp.slurm import commands as slurm
from clusterddp.slurm.batch import batch_script
from clusterddp.slurm.queue import QueuedJob

#: Polling intervals for the job's files and for Slurm, in seconds.
LOOK_S, ASK_S = 0.2, 1.0
#: What ended a job that did not end by itself, by Slurm's state.
_ENDS = {
    "PREEMPTED": "was preempted",
    "CANCELLED": "was cancelled",
    "TIMEOUT": "reached its time limit",
    "DEADLINE": "reached its deadline",
    "NODE_FAIL": "lost a node",
    "BOOT_FAIL": "lost a node",
    "OUT_OF_MEMORY": "ran out of memory; request more with --mem",
    "REVOKED": "was revoked",
}


def check_in_job(job: Job, steps: int) -> int:
    """Submits the job, waits for its result and says it; returns the exit code. Nothing is left of it.

    Raises ResumeDiffers, with the first difference, CheckUnfinished when the job ends before the check, ClusterddpError
    when the script fails or makes too few steps, SlurmError when Slurm refuses the job.
    """
    fitted = fit(without_side_effects(job))
    plant = with_code(fitted, None, batch=True)
    with temporary_folder() as path:
        owner = RunDirectory(path)
        # On Ctrl-C between sbatch's answer and the lines that follow, the job would be left.
        with signals_blocked(signal.SIGINT), recorded(owner, fitted, created=True, plant=plant):
            job_id = submit(fitted, owner, steps)
        if not sys.stdout.isatty():
            print(job_id, flush=True)
        show(f"resume check: submitted as job {job_id}; Ctrl-C cancels it")
        watch = Watch(owner, job_id)
        try:
            with interrupts_counted(watch.interrupt):
                code, words = watch.until_result()
        except Interrupted:
            say(f"interrupted: job {job_id} is cancelled, and nothing was found out")
            return INTERRUPTED
        finally:
            awaited_job.end(job_id)
    return conclude(code, words)


def fit(job: Job) -> Job:
    """The job with the resources that it requests of the cluster."""
    remarks = resources.check_micro(job)
    fitted, more = resources.fit_to_cluster(job, required=True)
    for remark in [*remarks, *more[:-1]]:  # the last one says what follows a preemption
        show(remark)
    return fitted


def submit(job: Job, owner: RunDirectory, steps: int) -> str:
    """Writes what the job reads, and submits it; returns its id. It is not requeued: the check has a user who waits."""
    write_steps(owner.path, steps)
    write_atomically(owner.batch_script, script(job, owner))
    return slurm.submit(owner.batch_script, "--no-requeue", timeout_s=None)


def script(job: Job, owner: RunDirectory) -> str:
    """The batch script."""
    return batch_script(job, owner, Path.cwd(), module="clusterddp.cli.resume_check.batch_step")


def conclude(code: int, words: str) -> int:
    """Says the result as the check on this machine does: raises the error of its exit code, or returns 0."""
    if code == 0:
        show(words)
        return 0
    kinds = (ResumeDiffers, NotRepeatable, CheckUnfinished)
    raise next((kind for kind in kinds if kind.exit_code == code), ClusterddpError)(words)


@dataclass
class Watch:
    """The wait for a job's result: says why it waits, where it runs, and what it prints."""

    owner: RunDirectory
    job_id: str
    _said: str = ""
    _ended_at: float | None = None
    _log: Tail = field(init=False)

    def __post_init__(self) -> None:
        self._log = Tail(self.owner.logs / f"job-{self.job_id}.log")

    def interrupt(self) -> None:
        """On Ctrl-C."""
        raise Interrupted

    def until_result(self) -> tuple[int, str]:
        """The exit code and the words of the check. CheckUnfinished or SlurmError if the job ends without them."""
        ask_at = 0.0
        while True:
            found = read_result(self.owner.path)
            for line in self._log.lines():
                show(line)
            if found:
                return found
            if time.monotonic() >= ask_at:
                try:
                    self._look_at(awaited_job.find(self.job_id))
                except SlurmUnavailable as error:  # the job runs on, and its result needs no controller
                    self._say(f"retrying: {error}")
                ask_at = time.monotonic() + ASK_S
            time.sleep(LOOK_S)

    def _look_at(self, job: QueuedJob | None) -> None:
        """Says what is new of the job; raises if it has ended and its result cannot come any more."""
        state = job.state if job else "unknown to Slurm"
        if job and job.live:
            self._say(awaited_job.progress(job))
            return
        ended_at = self._ended_at = self._ended_at or time.monotonic()
        ended = next((words for name, words in _ENDS.items() if state.startswith(name)), "")
        if time.monotonic() < ended_at + (2 * ASK_S if ended else LATE_S):
            return  # the batch step may have written the result at last
        if ended:
            raise CheckUnfinished(unfinished(f"job {self.job_id} {ended}"))
        raise SlurmError(
            f"job {self.job_id} ended ({state}) on {(job and job.nodes) or 'no node'} without a result in "
            f"{self.owner.path.parent}. The nodes must see that folder, the Python environment and the folder that you "
            "submit in, at the same paths"
        )

    def _say(self, words: str) -> None:
        if words not in ("", self._said):
            show(f"resume check: job {self.job_id} {words}")
            self._said = words
