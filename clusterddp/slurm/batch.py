"""The batch script: a pure function of the job definition and the run directory, in submitit's terms."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from submitit import SlurmExecutor
from submitit.core.utils import FailedJobError, FailedSubmissionError

from clusterddp.errors import RunDirectoryError, SlurmError, UsageError
from clusterddp.jobdef.job import Job
from clusterddp.process import PACKAGE_FOLDER, module_command
from clusterddp.rundir.files import write_atomically
from clusterddp.rundir.run_directory import RunDirectory


class RunExecutor(SlurmExecutor):
    """submitit's Slurm executor for one run: it makes the script's text, calls sbatch and reads the job id.

    The script runs the supervisor by its name instead of unpickling it with submitit's entry point. So ``sbatch
    job.sbatch`` by hand continues the run, and submitit's signal handlers, which requeue by themselves and take TERM's
    being ignored away from srun, are never installed.
    """

    def __init__(self, job: Job, run: RunDirectory, folder: Path) -> None:
        check_lines(job, run, folder)
        super().__init__(run.private / "submitit")
        self._run = run
        self._ranks = job.world_size
        self._chdir = folder
        self._command = f"exec {shlex.join([*module_command('clusterddp.supervisor', job.python), str(run)])}"
        self.update_parameters(**batch_parameters(job, run, folder))

    @classmethod
    def affinity(cls) -> int:
        """A dry run needs no Slurm; a real submission has asked for sbatch before."""
        return 2

    @property
    def _submitit_command_str(self) -> str:
        return self._command

    def script(self) -> str:
        """The exact text that is submitted."""
        return self._make_submission_file_text(self._command, "")

    def submit_run(self) -> str:
        """Writes the run's ``job.sbatch`` and submits it; returns the job id. SlurmError when sbatch refuses."""
        write_atomically(self._run.batch_script, self.script())
        try:
            return str(self.submit(_named_by_the_script, str(self._run)).job_id)
        except FailedJobError as error:  # sbatch's own exit code
            raise SlurmError(f"sbatch refused the job: {str(error).strip()}") from error
        except FailedSubmissionError as error:
            raise RunDirectoryError(f"sbatch took the job, but its answer cannot be read: {error}") from error

    def _num_tasks(self) -> int:
        return self._ranks  # submitit would multiply, and a number of nodes such as 2-4 is text

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        del submission_file_path  # submitit's copy of the same text
        return ["sbatch", str(self._run.batch_script)]


def _named_by_the_script(run_directory: str) -> None:
    """What submitit pickles beside the job. Nothing loads it: the script names the supervisor."""


def check_lines(job: Job, run: RunDirectory, folder: Path) -> None:
    """Raises UsageError for what would not stay on its line of the script, where the rest of it would be a command.

    Values of the job definition are checked as they are read; these are not.
    """
    names = {"the run directory": str(run), "the folder to run in": str(folder), "the interpreter": sys.executable}
    package = {} if job.python else {"the folder of the package": str(PACKAGE_FOLDER)}
    for what, text in {**names, **package, "python:": job.python or "python"}.items():
        if not text.isprintable():
            raise UsageError(f"{what} {text!r} has line breaks or control characters, which a batch script cannot hold")
    for character in "%\\":  # such a job never starts, or logs elsewhere: %% is no escape (seen on 22.05.8)
        if character in str(run):
            raise UsageError(f"the run directory {run} has a {character}, which Slurm replaces in the names of logs")


def batch_parameters(job: Job, run: RunDirectory, folder: Path) -> dict[str, Any]:
    """submitit's parameters for a job. ``folder``: where the job runs, and relative paths of the script's start.

    What is None is left to Slurm's own defaults (submitit would otherwise ask for 5 minutes).
    """
    log = str(run.logs / "job-%j.log")
    additional: dict[str, Any] = {
        "requeue": True,
        "chdir": str(folder),
        "output": log,
        "error": log,
        **{key.replace("_", "-"): value for key, value in _optional(job).items()},
        **{key: value for key, value in job.sbatch.items() if value is not False},
    }
    return {
        "job_name": job.name,
        "time": job.time_text,
        "partition": job.partition,
        "nodes": job.nodes_text,
        "ntasks_per_node": job.ranks_per_node,
        "cpus_per_task": job.cpus_per_task,
        "signal_delay_s": fallback_signal_s(job),
        "wckey": None,
        "use_srun": False,
        "setup": ["trap '' TERM", *job.setup],
        "additional_parameters": additional,
    }


def fallback_signal_s(job: Job) -> int:
    """How many seconds before the time limit Slurm warns the ranks, which it does up to 60 s early.

    Only the net below the supervisor's own timer, which is to come first.
    """
    return min(30, int(job.timeouts.notice_s), (job.time_s or 86400) // 8)


def _optional(job: Job) -> dict[str, Any]:
    gpus = f"{job.gpu_type}:{job.gpus_per_node}" if job.gpu_type else str(job.gpus_per_node)
    values = {
        "gpus_per_node": gpus if job.device == "cuda" else None,
        "account": job.account,
        "qos": job.qos,
        "constraint": job.constraint,
        "reservation": job.reservation,
        "exclude": job.exclude,
        "nodelist": job.nodelist,
        "mem": job.mem,
    }
    return {key: value for key, value in values.items() if value is not None}
