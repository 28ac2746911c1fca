"""The batch script: its text, a pure function of the job and the run directory, and its submission."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from submitit import SlurmExecutor

from clusterddp.errors import UsageError
from clusterddp.failures import exclusion
from clusterddp.jobdef.job import KEYS, Job
from clusterddp.jobdef.kinds import Sbatch
from clusterddp.jobdef.program import calls_method, module_file
from clusterddp.process import PACKAGE_FOLDER, module_command
from clusterddp.rundir.files import write_atomically
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm import queue

#: Variables from which sbatch takes options. They are shown at submission, because users may have forgotten them.
_SHOWN = ("SBATCH_", "SLURM_ACCOUNT", "SLURM_CLUSTERS", "SLURM_CONF")


def check_micro(job: Job) -> list[str]:
    """Checks that a job with a range of nodes calls ``run.micro()``, to split a step's samples on fewer nodes.

    Returns remarks for the user if that cannot be checked here.
    """
    if job.min_nodes is None:
        return []
    file = Path(job.script) if job.script else module_file(job.module or "", Path.cwd())
    if file is None:
        return [f"module {job.module} is not in {Path.cwd()}, so clusterddp did not check that it calls run.micro()"]
    if calls_method(file, Path(job.script).parent if job.script else Path.cwd(), "micro"):
        return []
    raise UsageError(
        f"--nodes {job.nodes_text}: {file} never calls run.micro(), and on fewer nodes a rank's share of a step may "
        "not fit into its memory. Put `for micro in run.micro(batch):` around the forward and backward passes, or "
        "request a fixed number of nodes"
    )


class _Executor(SlurmExecutor):
    @classmethod
    def affinity(cls) -> int:
        """Always that of a submission host, because a dry run needs no Slurm."""
        return 2


def batch_script(job: Job, run: RunDirectory, folder: Path, module: str = "clusterddp.supervisor") -> str:
    """The batch script, as submitit writes it, except that its last line becomes the supervisor, or another ``module``.

    submitit's own command would unpickle a function that ``sbatch job.sbatch`` by hand could not find, and install
    signal handlers that requeue the job and stop ignoring TERM. Only a private method takes another command, which is
    why pyproject.toml caps submitit's version.
    """
    check_lines(run, folder)
    command = f"exec {shlex.join([*module_command(module), str(run)])}"
    return script_text(batch_parameters(job, run, folder), command)


def array_script(job: Job, array: Path, size: int, most: int | None, folder: Path) -> str:
    """The batch script of a job array with ``size`` runs of one folder, ``array``'s grandparent.

    ``array`` has a symbolic link to the run of each task, named by the task's index: Slurm opens the task's log through
    it. ``most``: how many tasks may run at a time. The script differs in nothing else from that of a single run, whose
    own ``job.sbatch`` continues it outside the array.
    """
    check_lines(RunDirectory(array), folder)
    run = RunDirectory(array / "%a")
    parameters = batch_parameters(job, run, folder)
    log = str(run.logs / "job-%A_%a.log")
    limit = f"%{most}" if most is not None else ""
    parameters["additional_parameters"] |= {"array": f"0-{size - 1}{limit}", "output": log, "error": log}
    supervisor = shlex.join(module_command("clusterddp.supervisor"))
    lines = [
        f'run=$(readlink {shlex.quote(str(array))}/"$SLURM_ARRAY_TASK_ID") || exit 1',
        f'exec {supervisor} {shlex.quote(str(array.parents[1]))}/"${{run##*/}}"',
    ]
    return script_text(parameters, "\n".join(lines))


def script_text(parameters: dict[str, Any], command: str) -> str:
    """The batch script that submitit writes for these parameters, with another command, of one or more lines."""
    executor = _Executor("submitit")  # the folder of default values, all of which the parameters replace
    executor.update_parameters(**parameters)
    return executor._make_submission_file_text(command, "")


def submit(
    job: Job,
    run: RunDirectory,
    folder: Path,
    excluded: Sequence[str] = (),
    is_new: Callable[[str], bool] = lambda _: True,
) -> str:
    """Writes the run's ``job.sbatch`` and submits it, without the nodes to exclude now. Returns the job id.

    ``is_new``: as for ``queue.submit``.
    """
    write_atomically(run.batch_script, batch_script(job, run, folder))
    options = exclusion.option(job.exclude, excluded)
    return queue.submit(run.batch_script, *options, is_new=is_new)


def check_lines(run: RunDirectory, folder: Path) -> None:
    """Raises UsageError for text with a line break, after which the rest would be a command in the script.

    Values of the job definition were checked when they were read.
    """
    names = {"the run directory": str(run), "the folder to run in": str(folder), "the interpreter": sys.executable}
    for what, text in {**names, "the folder of the package": str(PACKAGE_FOLDER)}.items():
        if not text.isprintable():
            raise UsageError(f"{what} {text!r}: line breaks and control characters are not allowed in a batch script")
    for character in "%\\":  # such a job never starts, or logs elsewhere, and %% does not escape it (seen on 22.05.8)
        if character in str(run):
            raise UsageError(
                f"the run directory {run} contains {character}, which Slurm replaces in the names of log files. Choose "
                "a different --run-dir"
            )


def batch_parameters(job: Job, run: RunDirectory, folder: Path) -> dict[str, Any]:
    """submitit's parameters for a job. ``folder``: the job's working directory.

    None leaves a parameter to Slurm's defaults (submitit's default time limit is 5 minutes).
    """
    log = str(run.logs / "job-%j.log")
    requeue = {"requeue": "expedite" if job.expedite_requeue else True} if job.continues else {"no-requeue": True}
    additional: dict[str, Any] = {**requeue, "chdir": str(folder), "output": log, "error": log}
    given = {name.replace("_", "-"): entry.write(job) for name, entry in KEYS.items() if entry.mark(Sbatch)}
    additional |= {name: value for name, value in given.items() if value is not None}
    if job.mem == "none":
        del additional["mem"]
    if job.outlives_nodes:
        additional["no-kill"] = True
    additional |= {key: value for key, value in job.sbatch.items() if value is not False}
    if job.device == "cuda" and job.gpu_request != "none":
        additional |= _gpus(job)
    return {
        "job_name": job.name,
        "time": job.time_text,
        "nodes": job.allocated_text,
        **_tasks(job),
        "signal_delay_s": fallback_signal_s(job),
        "wckey": None,
        "use_srun": False,
        "setup": ["trap '' TERM", *job.setup],
        "additional_parameters": additional,
    }


def _gpus(job: Job) -> dict[str, str]:
    """The option that requests the GPUs of a node; --gres also has what the job definition gives for it."""
    gpus = f"{job.gpu_type}:{job.gpus_per_node}" if job.gpu_type else str(job.gpus_per_node)
    if job.gpu_request == "gpus-per-node":
        return {"gpus-per-node": gpus}
    return {"gres": ",".join([f"gpu:{gpus}", *([str(job.sbatch["gres"])] if job.sbatch.get("gres") else [])])}


def _tasks(job: Job) -> dict[str, int | None]:
    """A task per rank, or for a range of nodes one per node with the CPUs of its ranks.

    slurmctld allocates at most as many nodes as the job has tasks, and takes --ntasks-per-node for tasks of the fewest
    nodes: ``--nodes=1-4 --ntasks-per-node=1`` would always get one node (seen on 22.05.8).
    """
    if job.min_nodes is None:
        return {"ntasks_per_node": job.ranks_per_node, "cpus_per_task": job.cpus_per_task}
    return {"cpus_per_task": (job.cpus_per_task or 1) * job.ranks_per_node}


def fallback_signal_s(job: Job) -> int:
    """Seconds before the time limit at which Slurm signals the ranks, up to 60 s early.

    A fallback for the supervisor's own timer, which comes first.
    """
    return min(30, int(job.timeouts.notice_s), (job.time_s or 86400) // 8)
