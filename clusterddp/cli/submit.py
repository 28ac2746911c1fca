"""``clusterddp submit``, also ``python -m clusterddp.submit``: from a script or a job definition to a run.

It answers at once and imports no torch: login nodes are shared. Everything is checked before anything is written.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from clusterddp.checkpoint.store import check_present, of_run
from clusterddp.cli.fork import Fork
from clusterddp.cli.options import (
    check_combinations,
    check_folder,
    check_local_ranks,
    check_nodes_fixed,
    check_tasks_are_ranks,
    resolve_job,
)
from clusterddp.cli.recording import Plant, check_not_held, choose_run_directory, claim, record_local, recorded
from clusterddp.environment import in_batch_step
from clusterddp.errors import INTERRUPTED, RunDirectoryError, UsageError
from clusterddp.jobdef.differences import list_differences
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.load import load_resolved
from clusterddp.reporter import say, show
from clusterddp.rundir.files import write_atomically
from clusterddp.rundir.ownership import check_run
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm.commands import scrub_own
from clusterddp.supervisor.lease import let_go_unreachable
from clusterddp.supervisor.messages import at_step

BENCHMARKS = Path(__file__).parents[1] / "bench"


def submit(arguments: argparse.Namespace, script_arguments: Sequence[str] | None) -> int:
    """Carries out ``submit``; ``script_arguments`` is None when there was no ``--``. Returns the exit code."""
    check_combinations(arguments)
    os.umask(os.umask(0) & 0o077)  # one that takes rights from the user alone (277) would stop the run, and Slurm's log
    if not arguments.here:
        scrub_own()
    job = resolve_job(arguments, script_arguments)
    code = check(arguments, job)
    if code is not None:
        return code
    if arguments.take_over and not arguments.dry_run:
        let_go_unreachable(RunDirectory(arguments.run_dir))
    if arguments.here:
        return submit_here(arguments, job)
    if arguments.local:
        return submit_local(arguments, job)
    return submit_slurm(arguments, job)


def bench(arguments: argparse.Namespace, script_arguments: Sequence[str] | None) -> int:
    """Submits a packaged benchmark, and shows what it prints. Returns the exit code."""
    names = sorted(path.stem for path in BENCHMARKS.glob("*.yaml"))
    if arguments.target not in names:
        raise UsageError(f"bench {arguments.target or '(nothing)'}: expected {' or '.join(names)}")
    arguments.target = str(BENCHMARKS / f"{arguments.target}.yaml")
    arguments.follow = not (arguments.local or arguments.here or arguments.dry_run)
    return submit(arguments, script_arguments)


def check(arguments: argparse.Namespace, job: Job) -> int | None:
    """Checks that the job may start, or continue the run in ``--run-dir``; the exit code where that run is over."""
    if arguments.run_dir:
        check_folder(arguments.run_dir)
        run = RunDirectory(arguments.run_dir)
        differences = check_continues(run, job, arguments.change)
        code = check_over(run, bool(differences)) if run.exists() else None
        if code is not None:
            return code
        if differences and not arguments.change:
            show(f"{run} failed before its first step, and starts with other arguments: {'; '.join(differences)}")
            arguments.change = True
    check_nodes_fixed(arguments, job)
    check_local_ranks(arguments, job)
    check_tasks_are_ranks(arguments, job)
    show(f"{job.name}: {job.shape}")
    return None


def check_continues(run: RunDirectory, job: Job, change: bool) -> list[str]:
    """Checks that the job may begin or continue the run; returns what differs from what is recorded.

    Other arguments than recorded are an error that lists them, unless ``change`` is to record them, or the run failed
    before its first step. What every step depends on stays as it was recorded.
    """
    if not run.exists():
        if run.path.exists() and any(run.path.iterdir()):
            raise RunDirectoryError(f"{run} is not empty and holds no run (no job.yaml): name another --run-dir")
        return []
    check_run(run)
    recorded = load_resolved(run.job_file)
    differences = list_differences(recorded, job)
    if differences and not change and not failed_before_first_step(run):
        raise RunDirectoryError(
            f"{run} was started with other arguments: {'; '.join(differences)}. "
            "Leave them as recorded, add --change to record and use the new ones, or name another --run-dir"
        )
    check_frozen(run, recorded, job)
    return differences


def check_frozen(run: RunDirectory, recorded: Job, job: Job) -> None:
    """What the order of the samples depends on stays as it is once there is a checkpoint: a rank would refuse that."""
    changed = ["seed"] if job.seed != recorded.seed else []
    if job.global_batch and recorded.global_batch and job.global_batch != recorded.global_batch:
        changed.append("global_batch")
    if changed and any(run.checkpoints.glob("step-*")):
        was, now = (", ".join(f"{key} {getattr(one, key)}" for key in changed) for one in (recorded, job))
        raise RunDirectoryError(
            f"{run} has checkpoints of a training with {was}, which cannot continue with {now}: leave it as recorded, "
            "or start a new run with another --run-dir"
        )


def failed_before_first_step(run: RunDirectory) -> bool:
    """Whether nothing was trained in a failed run: no step recorded, no file of the script's own."""
    outcome = run.outcome()
    if outcome is None or outcome["state"] != "failed" or outcome["step"] or run.last_metrics() is not None:
        return False
    own = {path.name for path in (run.job_file, run.batch_script, run.events_file, run.metrics_file, run.outcome_file)}
    own |= {path.name for path in (run.checkpoints, run.logs, run.private)}
    return not any(run.checkpoints.glob("*")) and not {path.name for path in run.path.iterdir()} - own


def check_over(run: RunDirectory, changing: bool) -> int | None:
    """None when the run may go on. A failed run may, and so may a completed one whose arguments change."""
    outcome = run.outcome()
    if outcome is None or outcome["state"] == "failed" or (outcome["state"] == "completed" and changing):
        check_present(of_run(run))
        return None
    if outcome["state"] == "completed":
        show(f"{run} completed{at_step(outcome['step'])} already: nothing to do. --change --set ... extends it")
        return 0
    raise RunDirectoryError(f"{run} was cancelled{at_step(outcome['step'])}: it never runs again. Start another run")


def submit_local(arguments: argparse.Namespace, job: Job) -> int:
    """Runs the job here, and waits."""
    from clusterddp.cli.local import LocalRun, Moment, step_warning
    from clusterddp.cli.progress import Progress
    from clusterddp.supervisor import lease

    moments = [Moment.parse(text) for text in arguments.preempt_after]
    if warning := step_warning(job, moments):
        show(warning)
    run = record_local(arguments.run_dir, job, fork_of(arguments))
    show(f"run directory: {run}")
    lease.loop_started(run)
    with Progress(run, job.steps, bar=arguments.debug is None) as progress:
        code = LocalRun(run, job, moments, arguments.debug).loop(progress)
    with suppress(OSError):  # a disk that is full: who asks finds no such process
        lease.loop_ended(run)
    return ended(run, code, f"clusterddp submit --local --run-dir {run}")


def ended(run: RunDirectory, code: int, how: str) -> int:
    """Says how a run that is not over can be continued; returns the exit code, as a shell has it for a signal."""
    if code < 0:
        say(f"the supervisor was killed by signal {-code}, and its ranks ended with it; check memory")
    if (code < 0 or code == INTERRUPTED) and run.outcome() is None:
        show(f"stopped; continue with: {how}")
    return code if code >= 0 else 128 - code


def submit_here(arguments: argparse.Namespace, job: Job) -> int:
    """Runs the job in the allocation around; the same run directory continues the run.

    In a batch step, as the supervisor, in this very process. In salloc's shell it shows progress, and waits.
    """
    from clusterddp.cli.allocated import AllocatedRun
    from clusterddp.cli.progress import Progress
    from clusterddp.slurm import resources
    from clusterddp.slurm.batch import RunExecutor
    from clusterddp.supervisor.main import supervise_slurm

    run, created = claim(arguments.run_dir, job)
    if not run.exists() or arguments.change:
        with recorded(run, job, created):
            script = RunExecutor(resources.as_allocated(job, os.environ), run, Path.cwd()).script()
            write_atomically(run.batch_script, script)
    if in_batch_step(os.environ):
        return supervise_slurm(str(run))
    show(f"run directory: {run}")
    with Progress(run, job.steps) as progress:
        code = AllocatedRun(run, job).loop(progress)
    return ended(run, code, f"clusterddp submit --here --run-dir {run}, or sbatch {run.batch_script}")


def submit_slurm(arguments: argparse.Namespace, job: Job) -> int:
    """Checks the request against the cluster, submits, and waits when asked to."""
    from clusterddp.cli.watch import watch
    from clusterddp.slurm.batch import RunExecutor

    fitted = fit(job, required=not arguments.dry_run)
    if arguments.dry_run:
        print(RunExecutor(fitted, choose_run_directory(arguments.run_dir, job), Path.cwd()).script())
        return 0
    run, job_id = submit_fitted(arguments.run_dir, fitted, job, fork_of(arguments))
    if not sys.stdout.isatty():
        print(job_id, flush=True)
    show(f"submitted as job {job_id}; run directory: {run}\nlook with: clusterddp status {run}")
    if arguments.wait or arguments.follow:
        return watch([run], follow=arguments.follow)
    return 0


def fit(job: Job, required: bool) -> Job:
    """The job as the cluster can run it; see ``resources.fit_to_cluster``."""
    from clusterddp.slurm import resources

    said = resources.check_micro(job)
    fitted, remarks = resources.fit_to_cluster(job, required=required)
    for remark in [*said, *remarks]:
        show(remark)
    return fitted


def submit_fitted(run_dir: str | None, fitted: Job, job: Job, plant: Plant | None) -> tuple[RunDirectory, str]:
    """Records ``job`` and submits it, as ``fitted`` to the cluster; returns the run and the job id."""
    from clusterddp.slurm.batch import RunExecutor
    from clusterddp.supervisor.lease import submitted

    run, created = claim(run_dir, job)
    check_not_held(run)
    with uninterrupted(), recorded(run, job, created, plant):
        job_id = RunExecutor(fitted, run, Path.cwd()).submit_run()
        submitted(run, job_id)
        run.loop_file.unlink(missing_ok=True)
    return run, job_id


def fork_of(arguments: argparse.Namespace) -> Plant | None:
    """Plants the checkpoint that ``--fork`` names, if it is given."""
    return (lambda run: show(Fork.parse(arguments.fork).plant(run))) if arguments.fork else None


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the body is done: between sbatch's answer and our record of it, nobody would know the job."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
