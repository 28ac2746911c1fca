"""From a script or a job definition to a recorded, submitted run: for ``submit``, sweeps and ``clusterddp.launch()``.

Everything is checked before anything is written.
"""

from __future__ import annotations

import glob
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from clusterddp.checkpoint.store import of_run
from clusterddp.errors import CheckpointError, JobDefinitionError, RunDirectoryError, UsageError
from clusterddp.failures import node_memory
from clusterddp.history.words import at_step
from clusterddp.jobdef import load as jobs
from clusterddp.jobdef.configuration_files import clusters_in, read_configuration_files, site_profile
from clusterddp.jobdef.configuration_paths import ConfigurationFile, find_configuration_files
from clusterddp.jobdef.differences import list_differences
from clusterddp.jobdef.job import KEYS, Job
from clusterddp.jobdef.kinds import Frozen, site_names
from clusterddp.jobdef.load import load_resolved
from clusterddp.jobdef.program import is_hydra_app, module_file, placeholders_in
from clusterddp.jobdef.tracking import check_packages
from clusterddp.process import PACKAGE_FOLDER, signals_blocked
from clusterddp.reporter import counted, show
from clusterddp.rundir.files import unlink
from clusterddp.rundir.ownership import check_run
from clusterddp.rundir.run_directory import RunDirectory, runs_folder
from clusterddp.runs.recording import ONLY_JOB, Content, check_not_submitted, claim, exclusively, present_code, recorded
from clusterddp.slurm import commands as slurm
from clusterddp.slurm.configuration import usable_nodes
from clusterddp.staging import Packed, pack
from clusterddp.supervisor import lease
from clusterddp.trackers.registry import TRACKERS


def describe(
    target: str | None,
    values: dict[str, Any],
    overrides: Mapping[str, str],
    origins: jobs.Origins | None = None,
    section: str | None = None,
    on: str | None = None,
) -> Job:
    """The job of a YAML file, or of a script with ``values``, on top of the configuration files.

    ``origins``, ``section`` and ``on``: as in ``load``.
    """
    files, cluster = find_configuration_files(os.environ, Path.cwd()), slurm.named_cluster(os.environ)
    defaults = read_configuration_files(files, cluster)
    for remark in _of_cluster(files, cluster):
        show(remark)
    if target and Path(target).suffix in (".yaml", ".yml"):
        job = jobs.load(target, overrides, values=values, defaults=defaults, origins=origins, section=section, on=on)
    else:
        values |= {"script": target} if target else {}
        job = jobs.from_values(values, overrides=overrides, defaults=defaults, origins=origins, on=on)
    return with_hydra(job)


def _of_cluster(files: Sequence[ConfigurationFile], cluster: str | None) -> Iterator[str]:
    """Remarks on the cluster's name: no file has a section for it, or a site's profile is for it."""
    if cluster is None and shutil.which("sbatch") is None:  # not a cluster
        return
    known = clusters_in(files)
    if known and cluster is None:
        yield f"the cluster's name is unknown, so no section of `clusters:` applies ({', '.join(known)})"
    elif known and cluster not in known:
        yield f"no section of `clusters:` is for the cluster {cluster} ({', '.join(known)})"
    for name in site_names() if cluster and not files else ():
        if (profile := site_profile(name)).cluster == cluster:
            yield (
                f"this may be {profile.about}. To use what its documentation says, write `defaults: {{site: {name}}}` "
                f"into ~/.config/clusterddp/config.yaml. `clusterddp config sites {name}` shows it"
            )


def with_hydra(job: Job) -> Job:
    """The job, with ``hydra: true`` if its program is a Hydra app."""
    if job.hydra is None and _is_hydra_app(job):
        job = replace(job, hydra=True)
    if job.hydra and (multirun := {"-m", "--multirun"} & set(job.args)):
        raise UsageError(
            f"{multirun.pop()}: every rank would run all members of this multirun. Use `clusterddp submit --sweep "
            f"lr=1,2`, or `python {job.script or f'-m {job.module}'} -m hydra/launcher=clusterddp lr=1,2`. To run all "
            "members in every rank, use --set hydra=false"
        )
    return job


def _is_hydra_app(job: Job) -> bool:
    file = Path(job.script) if job.script else module_file(str(job.module), Path.cwd())
    return file is not None and is_hydra_app(file)


def check(job: Job, run_dir: str | None, *, change: bool = False, place: str | None = None) -> list[str] | None:
    """Checks that the job can start, or continue the run in ``run_dir``.

    ``place``: ``--local`` or ``--here``. None for a Slurm job. Returns the differences from the recorded job, to
    be recorded, or None if the run has completed.
    """
    differences: list[str] = []
    if run_dir:
        check_folder(run_dir)
        run = RunDirectory(run_dir)
        differences = check_continues(run, job, change)
        if run.exists() and completed(run, bool(differences)):
            return None
        if differences and not change:
            show(f"{run} failed before its first step. Recording the new arguments: {', '.join(differences)}")
    if not (run_dir and RunDirectory(run_dir).exists()):
        check_done(job)
    check_ranks(job, place)
    if job.python_of_ranks is None:
        check_packages(job)
        check_syntax(job)
    if place == "--local" and (job.node_setup or job.stage):
        show("node_setup and stage are ignored with --local")
    if place and job.spare_nodes:
        show(f"spare_nodes is ignored with {place}, because all nodes run ranks")
        job = replace(job, spare_nodes=0)
    show(f"{job.name}: {job.shape}")
    return differences


def check_syntax(job: Job) -> None:
    """Refuses a script, or a module, that its interpreter could not compile, rather than after a wait in the queue.

    Runs nothing, not even the module's packages.
    """
    script = Path(job.script) if job.script else module_file(str(job.module), Path.cwd())
    try:
        if script is None or not script.is_file():  # a missing script is reported elsewhere
            return
        source = script.read_bytes()
    except OSError:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python prints them when the ranks run it
            compile(source, script, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:  # ValueError: a NUL byte
        place = f"{script}:{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else str(script)
        raise JobDefinitionError(f"{place}: {type(error).__name__}: {getattr(error, 'msg', error)}") from error


def check_done(job: Job) -> None:
    """Checks that no folder that exists already would be the mark of a new run's end, once something is written to
    it."""
    pattern = (job.done and job.done.file) or ""
    if "run_dir" in placeholders_in(pattern):
        return
    if folder := next(filter(os.path.isdir, glob.glob(pattern, recursive=True)), None):  # noqa: PTH207
        raise UsageError(
            f"done: {folder} is an existing folder. Name a file that the script writes once it has finished"
        )


def check_folder(path: str) -> None:
    """Checks that the path can be a folder, and stays on its line of a batch script."""
    if not path.isprintable():
        raise UsageError(f"--run-dir {path!r}: line breaks and control characters are not allowed in a path")
    try:
        Path(path).stat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"--run-dir {path[:200]}: {error.strerror}") from error
    if not Path(path).is_dir():
        raise UsageError(f"--run-dir {path} is a file. Expected a run directory, or a path for a new one")


def check_continues(run: RunDirectory, job: Job, change: bool) -> list[str]:
    """Checks that the job may start or continue the run. Returns how it differs from the recorded one.

    Differences are an error unless ``change`` is set or the run failed before its first step. Values on
    which every step depends cannot change.
    """
    if not run.exists():
        check_not_submitted(run)
        if run.path.exists() and any(run.path.iterdir()):
            raise RunDirectoryError(f"{run} is not empty and holds no run (no job.yaml). Choose a different --run-dir")
        return []
    check_run(run)
    recorded = load_resolved(run.job_file)
    differences = list_differences(recorded, job)
    if differences and not change and not failed_before_first_step(run):
        raise RunDirectoryError(
            f"{run} was started with other arguments: {', '.join(differences)}. To continue with the recorded "
            f"arguments, use `clusterddp submit --run-dir {run.quoted}`. To record the new ones, add --change. For a "
            "new run, choose a different --run-dir"
        )
    check_frozen(run, recorded, job)
    return differences


def check_frozen(run: RunDirectory, recorded: Job, job: Job) -> None:
    """Checks that what the order of samples depends on is as recorded once there is a checkpoint."""
    if not any(run.checkpoints.glob("step-*")):
        return
    progress = saved_progress(run)
    saved = progress.get("global_batch")
    changed: dict[str, tuple[Any, Any]] = {}
    for key, entry in KEYS.items():
        frozen = entry.mark(Frozen)
        if frozen is None:
            continue
        was, now = entry.write(recorded), entry.write(job)
        if was is None and now is not None:  # the script chose it
            was = progress.get(key)
        if was != now and not (frozen.if_given and None in (was, now)):
            changed[key] = (was, now)
    if saved is not None and job.min_nodes is None and saved % job.world_size:
        raise RunDirectoryError(
            f"{run} has checkpoints with a global batch of {counted(saved, 'sample')}, which is not divisible by "
            f"{counted(job.world_size, 'rank')}. Use a number of ranks that divides it"
        )
    if changed:
        before, after = (
            ", ".join(f"{key} {'of the script' if pair[side] is None else pair[side]}" for key, pair in changed.items())
            for side in (0, 1)
        )
        raise RunDirectoryError(
            f"{run} has checkpoints made with {before} and cannot continue with {after}. Use the recorded value, or "
            "start a new run with a different --run-dir"
        )


def saved_progress(run: RunDirectory) -> Mapping[str, Any]:
    """The progress in the newest checkpoint that is not damaged. Empty if there is none."""
    for checkpoint in of_run(run).candidates():
        try:
            return {**checkpoint.read_head().state["progress"]}
        except (CheckpointError, OSError, LookupError, TypeError):
            continue
    return {}


def failed_before_first_step(run: RunDirectory) -> bool:
    """Whether a failed run has neither a recorded step nor a file that its script wrote."""
    outcome = run.outcome()
    if outcome is None or not outcome.failed or outcome.step or run.last_metrics() is not None:
        return False
    own = {path.name for path in (run.job_file, run.batch_script, run.events_file, run.metrics_file, run.outcome_file)}
    own |= {path.name for path in (run.checkpoints, run.logs, run.private, run.code)} | TRACKERS.keys()
    return not any(run.checkpoints.glob("*")) and not {path.name for path in run.path.iterdir()} - own


def completed(run: RunDirectory, changed: bool) -> bool:
    """Whether the run has completed, and no ``changed`` arguments extend it. RunDirectoryError for a cancelled one."""
    outcome = run.outcome()
    over = outcome is not None and not outcome.failed and not outcome.unconfirmed
    if outcome is None or not over or (outcome.completed and changed):
        of_run(run).check_present()
        return False
    if outcome.completed:
        show(
            f"{run} has already completed{at_step(outcome.step)}. For more steps, add --change and the new "
            "number of steps"
        )
        return True
    raise RunDirectoryError(
        f"{run} was cancelled{at_step(outcome.step)} and cannot continue. To start a new run from its newest "
        f"checkpoint, use: clusterddp submit --fork {run.quoted}"
    )


def check_ranks(job: Job, place: str | None) -> None:
    """Refuses keys that ``--here`` and ``--local`` do not support, and too many ranks for this machine."""
    if place and job.min_nodes is not None:
        raise UsageError(
            f"nodes {job.nodes_text} is a range for Slurm to choose from. With {place}, give one number, such as "
            f"--nodes {job.nodes} (add --change if the run has already started)"
        )
    cores = len(os.sched_getaffinity(0))
    most = max(64, 32 * cores)  # each rank is a Python process
    if place == "--local" and job.world_size > most:
        raise UsageError(
            f"--local: expected at most {most} ranks on this machine's {counted(cores, 'core')}, got {job.world_size}. "
            "Reduce --nodes or --gpus"
        )
    needed, named = job.nodes * job.gpus_per_node, os.environ.get("CUDA_VISIBLE_DEVICES")
    listed = len([gpu for gpu in (named or "").split(",") if gpu.strip()])
    if place == "--local" and job.device == "cuda" and named is not None and needed > listed:
        raise UsageError(
            f"--local needs {counted(needed, 'GPU')} of this machine ({job.shape}), but CUDA_VISIBLE_DEVICES={named} "
            f"lists {listed or 'none'}. Unset or change it, reduce --nodes or --gpus, or use --device cpu"
        )
    if place == "--here" and job.gpus_per_rank > 1:
        raise UsageError(
            f"gpus_per_rank {job.gpus_per_rank} cannot be combined with --here, because each task of the allocation is "
            "one rank. Remove it (--set gpus_per_rank=1) and request more GPUs than tasks in the sbatch script"
        )


def record_local(
    job: Job, run_dir: str | None, content: Content = ONLY_JOB, *, prints: bool = True, loop: bool = True
) -> RunDirectory:
    """Records a job that is to run on this machine, without Slurm.

    ``prints``: whether to print the run directory. ``loop``: whether this process then starts its attempts.
    """
    content = replace(content, code=present_code(job, run_dir, content.source))
    run, created = claim(run_dir, job)
    with exclusively(run, created):
        with recorded(run, job, created, content):
            pass
        if loop:
            lease.loop_started(run)
    if prints:
        show(f"Run directory: {run}")
    return run


def submit_to_slurm(job: Job, run_dir: str | None, content: Content = ONLY_JOB) -> tuple[RunDirectory, str]:
    """Checks the job against the cluster, records it and submits it. Returns the run and the job id."""
    from clusterddp.slurm import batch

    fitted = fit_to_cluster(job, required=True)
    beside = Path(run_dir).absolute().parent if run_dir else runs_folder(os.environ)
    environment = packed_environment(job, beside)
    content = replace(content, code=present_code(job, run_dir, content.source, batch=True), environment=environment)
    run, created = claim(run_dir, job)
    unlink(run.debug_file)  # of an earlier submission
    warn_of_unseen(run)
    with exclusively(run, created):
        excluded = node_memory.left_out(run, job, lambda: usable_nodes(job.partition), time.time())
        # On Ctrl-C between sbatch's answer and our record of it, the job id would be lost.
        with signals_blocked(signal.SIGINT, signal.SIGHUP), recorded(run, job, created, content):
            # A lost node may keep an earlier job of the run in COMPLETING.
            job_id = batch.submit(fitted, run, Path.cwd(), excluded, lambda job: not lease.started(run, job))
            lease.submitted(run, job_id)
            unlink(run.loop_file)
            show(f"Submitted as job {job_id}. Run directory: {run}")  # before Ctrl-C ends the command
    return run, job_id


def packed_environment(job: Job, beside: Path) -> Packed | None:
    """The environment of the job's ranks, in a file in a folder beside the runs. None if the nodes need no copy."""
    if job.stage is None:
        return None
    if job.in_image:
        raise UsageError("stage: the ranks' environment is in the image that an option of srun names. Remove `stage`")
    if job.python and "$" in job.python:
        raise UsageError(f"stage: expected an interpreter that exists here, and python is {job.python}")
    return _packed(job.python or sys.executable, beside, job.stage)


@cache
def _packed(python: str, beside: Path, stage: str) -> Packed:
    """Once for all members of a sweep."""
    packed = pack(python, beside)
    shared = f". Editable installs stay shared: {', '.join(packed.editable)}" if packed.editable else ""
    show(f"Every node gets a copy of {packed.prefix} ({packed.size / 1e9:.1f} GB) in {stage}{shared}")
    return packed


def warn_of_unseen(run: RunDirectory) -> None:
    """Warns of files that the nodes probably do not have. The job would fail before its supervisor could say why."""
    from clusterddp.checks.node import only_here

    places = {"the run directory": run.path, "Python": Path(sys.executable), "clusterddp": PACKAGE_FOLDER}
    for warning in only_here({what: path.absolute() for what, path in places.items()}):
        show(warning)


def fit_to_cluster(job: Job, required: bool) -> Job:
    """The job with the resources that it requests of the cluster. See ``resources.fit_to_cluster``."""
    from clusterddp.slurm import batch, resources

    remarks = batch.check_micro(job)
    fitted, more = resources.fit_to_cluster(job, required=required)
    for remark in [*remarks, *more]:
        show(remark)
    return fitted
