"""submitit's plugin: a repository's own launcher submits with clusterddp if ``CLUSTERDDP_SUBMITIT`` is set.

``submitit.AutoExecutor`` then gets ``ClusterddpExecutor`` wherever it would take submitit's own for Slurm, with the
same parameters. What it submits is a run: ``worker/function.py`` calls the callable and its ``checkpoint()``. submitit
imports this module in every process that makes an ``AutoExecutor``.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from submitit import SlurmExecutor
from submitit.core.core import InfoWatcher, Job
from submitit.core.job_environment import JobEnvironment
from submitit.core.utils import DelayedSubmission, JobPaths, UncompletedJobError

from clusterddp import protocol
from clusterddp.errors import RunFailed, UsageError

if TYPE_CHECKING:
    from clusterddp.api import Handle

#: The default of submitit's parameter ``time``, in minutes.
DEFAULT_TIME = 5
#: Parameters of submitit that a job definition has under the same name.
_SAME = ("partition", "qos", "constraint", "exclude", "account", "nodelist", "cpus_per_task", "nodes", "setup")
#: Those that are options of sbatch.
_SBATCH = (
    *("comment", "gres", "mail_type", "mail_user", "dependency", "exclusive", "wckey"),
    *("cpus_per_gpu", "mem_per_gpu", "mem_per_cpu"),
)
#: Those that clusterddp does not support, with the value for unused, and why.
_REFUSED: Mapping[str, tuple[Any, str]] = {
    "teardown": (None, "use the key `hook` in a configuration file instead"),
    "stderr_to_stdout": (False, "each rank has separate files for stdout and stderr in the run directory, below logs/"),
    "use_srun": (True, "clusterddp always starts the ranks with srun"),
    "gpus_per_task": (
        None,
        "set gpus_per_node. A task sees all GPUs of its node and uses the one with the number of its local rank",
    ),
}


def asked() -> str:
    """The user's choice: ``""``, ``1`` or ``local``. Raises UsageError."""
    value = os.environ.get(protocol.SUBMITIT, "")
    if value not in ("", "0", "1", "local"):
        raise UsageError(
            f"{protocol.SUBMITIT}={value!r}: expected 1 (a Slurm job) or local (processes on this machine)"
        )
    return "" if value == "0" else value


class ClusterddpExecutor(SlurmExecutor):
    """Submits with clusterddp. It has the name ``slurm``, to get the parameters that begin with ``slurm_``."""

    def __init__(self, folder: str | Path, *args: Any, **kwargs: Any) -> None:
        if not asked():
            raise UsageError(f"to make AutoExecutor use clusterddp, set {protocol.SUBMITIT}=1 and leave out `cluster`")
        super().__init__(folder, *args, **kwargs)
        python = kwargs.get("python")
        self._python: dict[str, Any] = {} if python is None else {"python": python}

    @classmethod
    def name(cls) -> str:
        """Of two executors with the same name, submitit takes a plugin's."""
        return "slurm" if os.environ.get(protocol.SUBMITIT, "0") not in ("", "0") else "clusterddp"

    @classmethod
    def affinity(cls) -> int:
        """Among several executors, submitit takes the one with the largest affinity. Its Slurm executor has 2."""
        return 2 if cls.name() == "slurm" else -1

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> list[Job[Any]]:
        """Starts a run for each. Raises UsageError for parameters that have no counterpart."""
        values = {**job_values(self.parameters, len(delayed_submissions)), **self._python}
        values["env"] = {"SUBMITIT_FOLDER": str(self.folder)}
        jobs: list[Job[Any]] = []
        for delayed in delayed_submissions:
            try:
                jobs.append(self._submitted(delayed, values))
            except Exception as error:
                if jobs:
                    made = ", ".join(job.job_id for job in jobs)
                    raise UsageError(
                        f"submitted {len(jobs)} of {len(delayed_submissions)} runs ({made}) before this error: {error}"
                    ) from error
                raise
        return jobs

    def _submitted(self, delayed: DelayedSubmission, values: dict[str, Any]) -> Job[Any]:
        from clusterddp.api import launch

        local = asked() == "local"
        handle = launch(delayed.function, *delayed.args, fn_kwargs=delayed.kwargs, local=local, **values)
        job_id = handle.job_id or handle.path.name
        job: ClusterddpJob = ClusterddpJob(self.folder, job_id, range(self._num_tasks()))
        job.belongs_to(handle)
        # The launcher's folder of outputs gets a link to the run directory, whose logs/ has them.
        job.paths.folder.mkdir(parents=True, exist_ok=True)
        link = job.paths.folder / f"{job_id}_run"
        link.unlink(missing_ok=True)
        link.symlink_to(handle.path)
        return job


def job_values(parameters: Mapping[str, Any], submissions: int = 1) -> dict[str, Any]:
    """The keys of a job definition for the parameters of submitit's executor for Slurm.

    Raises UsageError for those without a counterpart. The job definition's own checks apply to the rest.
    """
    given = {name: value for name, value in parameters.items() if value is not None}
    refused = [
        f"{name}={given.pop(name)!r}: {why}"
        for name, (unused, why) in _REFUSED.items()
        if name in given and given[name] != unused
    ]
    most = given.pop("array_parallelism", submissions)
    if most < submissions:
        refused.append(f"array_parallelism={most}: {submissions} runs are submitted, each as a separate job")
    srun, odd = _srun_options(given.pop("srun_args", ()))
    refused += [f"srun_args={word!r}: expected options such as --cpu-bind=none" for word in odd]
    if refused:
        raise UsageError("clusterddp does not support these parameters of submitit. " + ". ".join(refused))
    values = {"time": given.pop("time", DEFAULT_TIME), **_ranks(given)}
    values |= {name: given.pop(name) for name in _SAME if name in given}
    if name := re.sub(r"[^\w.+=@-]+", "-", str(given.pop("job_name", ""))).strip("-."):
        values["job_name"] = name
    if "mem" in given:
        values["mem"] = re.sub(r"^0[KMGT]?B?$", "0", str(given.pop("mem")))
    if notice := given.pop("signal_delay_s", None):
        values["timeouts"] = {"notice_s": notice}
    sbatch = {name: given.pop(name) for name in _SBATCH if given.get(name, False) is not False}
    for name, value in given.pop("additional_parameters", {}).items():
        key = name.replace("-", "_")
        (values if _is_key(key) else sbatch)[key] = value
    values |= {"sbatch": {name.replace("_", "-"): value for name, value in sbatch.items()}} if sbatch else {}
    values |= {"srun": srun} if srun else {}
    if left := sorted(given.keys() - set(_REFUSED) - set(_SBATCH)):
        raise UsageError(f"clusterddp does not support these parameters of submitit: {', '.join(left)}")
    return values


def _ranks(given: dict[str, Any]) -> dict[str, Any]:
    """Takes the tasks and GPUs of a node from ``given``. Raises UsageError if they cannot be divided evenly."""
    tasks = max(1, given.pop("ntasks_per_node", 1))
    gpus = str(given.pop("gpus_per_node", None) or given.pop("num_gpus", None) or 0)
    kind, _, number = gpus.rpartition(":")
    if not number.isdigit() or int(number) % tasks:
        raise UsageError(
            f"tasks_per_node={tasks} with gpus_per_node={gpus}: expected as many tasks as GPUs, or a divisor of that "
            "number"
        )
    if int(number) == 0:
        return {"gpus_per_node": tasks, "device": "cpu"}
    shared = {"gpus_per_rank": int(number) // tasks} if int(number) > tasks else {}
    return {"gpus_per_node": f"{kind}:{number}" if kind else int(number), **shared}


def _srun_options(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Options as a job definition's ``srun`` has them, and words that are not options."""
    options = [re.fullmatch(r"--([a-z][a-z0-9-]*)(?:=(.*))?", word) for word in words]
    found = {match[1]: True if match[2] is None else match[2] for match in options if match}
    return found, [word for word, match in zip(words, options, strict=True) if not match]


def _is_key(name: str) -> bool:
    from clusterddp.jobdef.job import KEYS

    return name in KEYS


class _Paths(JobPaths):
    """The logs of the newest attempt, and the files of the run directory."""

    def __init__(self, folder: Path, job_id: str, task_id: int | None, run: Path) -> None:
        super().__init__(folder, job_id, task_id)
        self._run = run

    def _log(self, ending: str) -> Path:
        from clusterddp.rundir.run_directory import RunDirectory

        run = RunDirectory(self._run)
        return run.attempt_logs(run.newest_attempt() or 0) / f"rank-{self.task_id}.{ending}"

    @property
    def stdout(self) -> Path:
        return self._log("out")

    @property
    def stderr(self) -> Path:
        return self._log("err")

    @property
    def submission_file(self) -> Path:
        return self._run / "job.sbatch"

    @property
    def submitted_pickle(self) -> Path:
        return self._run / "private" / "function.pkl"


class _Watcher(InfoWatcher):
    """Does nothing, because jobs query their own state."""

    def get_state(self, job_id: str, mode: str = "standard") -> str:  # noqa: ARG002
        return "UNKNOWN"

    def _make_command(self) -> None:
        return None


#: The states of a run, in Slurm's words.
_STATES = {"completed": "COMPLETED", "failed": "FAILED", "cancelled": "CANCELLED", "running": "RUNNING"}
_STATES |= {"pending": "PENDING", "held": "PENDING", "stopped": "STOPPED", "unknown": "UNKNOWN"}


class ClusterddpJob(Job[Any]):
    """A run as submitit's job. ``job_id``: the run's first Slurm job, or the name of a local run's directory."""

    watcher = _Watcher()
    run_dir: Path
    _opened: Handle | None

    def belongs_to(self, handle: Handle) -> None:
        """Sets the run of this job and of the jobs of its tasks."""
        for job in (self, *self._sub_jobs):
            job.__dict__.update(run_dir=handle.path, _opened=handle)
            job._paths = _Paths(job._paths._folder, job.job_id, job.task_id, handle.path)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def _handle(self) -> Handle:
        """The handle of the submission, which sees the process of a local run before its first record."""
        from clusterddp.api import Handle

        return self._opened or Handle(self.run_dir)

    @property
    def state(self) -> str:
        """The run's state in Slurm's words, or STOPPED if it is stopped and can be continued."""
        return _STATES[self._handle().status().state]

    def get_info(self, mode: str = "force") -> dict[str, str]:  # noqa: ARG002
        """The job id, the state and the run directory."""
        return {"JobID": self.job_id, "State": self.state, "RunDirectory": str(self.run_dir)}

    def done(self, force_check: bool = False) -> bool:  # noqa: ARG002
        """Whether the run is over."""
        return self.state in ("COMPLETED", "FAILED", "CANCELLED")

    def wait(self) -> None:
        """Waits until the run is over or stopped, through preemptions and restarts."""
        self._handle().wait()

    def cancel(self, check: bool = True) -> None:  # noqa: ARG002
        """Ends the run permanently."""
        self._handle().cancel()

    def submission(self) -> DelayedSubmission:
        """What was submitted."""
        from clusterddp.worker.function import load_function

        return load_function(self.paths.submitted_pickle)

    def _get_outcome_and_result(self) -> tuple[str, Any]:
        handle = self._handle()
        try:
            return "success", handle.result(all_ranks=True)[self._tasks[0]]
        except RunFailed as failure:
            if handle.status().state == "failed":
                return "error", str(failure)
            raise UncompletedJobError(str(failure)) from failure


class ClusterddpJobEnvironment(JobEnvironment):
    """``submitit.JobEnvironment()`` on a rank. Its ``job_id`` is the same in all attempts, because launchers name
    folders by it."""

    _env = {
        "job_id": str(protocol.FIRST_JOB),
        "num_tasks": "WORLD_SIZE",
        "node": "GROUP_RANK",
        "global_rank": "RANK",
        "local_rank": "LOCAL_RANK",
    }

    @property
    def num_nodes(self) -> int:
        """The nodes of this attempt."""
        return self.num_tasks // int(os.environ["LOCAL_WORLD_SIZE"])

    @property
    def hostnames(self) -> Sequence[str]:
        """The nodes of this attempt, that of rank 0 first."""
        from clusterddp.hostlist import expand

        nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
        local = os.environ.get(protocol.LAUNCHER) == "local" or not nodes
        return [socket.gethostname()] if local or nodes is None else expand(nodes)
