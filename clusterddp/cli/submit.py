"""``clusterddp submit``, also ``python -m clusterddp.submit``: from a script or a job definition to a run.

Imports no torch and answers at once: login nodes are shared.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from clusterddp.cli import fork
from clusterddp.cli.options import add_arguments as add_arguments
from clusterddp.cli.options import check_combinations, resolve_job
from clusterddp.cli.progress import Progress
from clusterddp.cli.recording import Plant, check_not_held, choose_run_directory, claim, recorded
from clusterddp.cli.submission import check, fit_to_cluster, record_local, submit_to_slurm, with_code
from clusterddp.environment import in_batch_step
from clusterddp.errors import INTERRUPTED, UsageError
from clusterddp.jobdef.job import Job
from clusterddp.reporter import say, show
from clusterddp.rundir.files import write_atomically, write_json
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm.commands import scrub_own
from clusterddp.supervisor import lease


def run(arguments: argparse.Namespace, script_arguments: Sequence[str] | None) -> int:
    """Carries out ``submit``; ``script_arguments`` is None when there was no ``--``. Returns the exit code."""
    check_combinations(arguments)
    os.umask(os.umask(0) & 0o077)  # one that denies the user access (277) would stop the run, and Slurm's log
    if not arguments.here:
        scrub_own()
    job = resolve_job(arguments, script_arguments)
    if arguments.sweep:
        from clusterddp.cli.sweeps.sweep import run_options

        return run_options(arguments, job)
    if arguments.check_resume is not None:
        return submit_check(arguments, job)
    place = place_of(arguments)
    differences = check(job, arguments.run_dir, change=arguments.change, place=place)
    if differences is None:
        return 0
    if arguments.take_over and not arguments.dry_run:
        lease.let_go_unreachable(RunDirectory(arguments.run_dir))
    if arguments.here:
        return submit_here(job, arguments.run_dir, changed=arguments.change or bool(differences))
    if arguments.local:
        return submit_local(arguments, job)
    return submit_slurm(arguments, job)


def place_of(arguments: argparse.Namespace) -> str | None:
    """The option that names the place of the ranks; None for a Slurm job: nothing else decides."""
    return "--local" if arguments.local else "--here" if arguments.here else None


def submit_check(arguments: argparse.Namespace, job: Job) -> int:
    """Checks the resume on this machine, in the surrounding allocation, or in a job for it, and waits."""
    from clusterddp.cli.resume_check.check import check_resume

    check(job, None, place=place_of(arguments))
    if arguments.local or arguments.here:
        return check_resume(job, arguments.check_resume, allocated=arguments.here)
    from clusterddp.cli.resume_check.slurm_job import check_in_job

    return check_in_job(job, arguments.check_resume)


def submit_local(arguments: argparse.Namespace, job: Job) -> int:
    """Runs the job on this machine, and waits."""
    from clusterddp.cli.local import LocalRun, Moment, step_warning

    moments = [Moment.parse(*given) for given in arguments.preemptions]
    if warning := step_warning(job, moments):
        show(warning)
    run = record_local(job, arguments.run_dir, fork_of(arguments))
    with Progress(run, job.steps, bar=arguments.debug is None, every_s=job.progress) as progress:
        code = LocalRun(run, job, moments, arguments.debug).loop(progress)
    with suppress(OSError):  # the disk is full: the entry names a process that no longer runs
        lease.loop_ended(run)
    return ended(run, code, f"clusterddp submit --local --run-dir {run.quoted}")


def submit_here(job: Job, run_dir: str | None, changed: bool) -> int:
    """Runs the job in the surrounding allocation; the same run directory continues the run.

    In a batch step this process becomes the supervisor. In salloc's shell it shows progress, and waits.
    """
    from clusterddp.cli.local import AllocatedRun
    from clusterddp.slurm import resources
    from clusterddp.slurm.batch import batch_script
    from clusterddp.supervisor.main import supervise_slurm

    plant = with_code(job, run_dir)
    run, created = claim(run_dir, job)
    if changed or not run.exists():
        with recorded(run, job, created, plant):
            script = batch_script(resources.as_allocated(job, os.environ), run, Path.cwd())
            write_atomically(run.batch_script, script)
    elif not in_batch_step(os.environ):  # there, it may have been requeued: nobody asks for the present code
        check_not_held(run, lease.of_job(os.environ["SLURM_JOB_ID"]))
        plant(run)
    if in_batch_step(os.environ):
        return supervise_slurm(str(run))
    show(f"run directory: {run}")
    with Progress(run, job.steps, every_s=job.progress) as progress:
        code = AllocatedRun(run, job).loop(progress)
    return ended(
        run, code, f"clusterddp submit --here --run-dir {run.quoted}, or sbatch {shlex.quote(str(run.batch_script))}"
    )


def submit_slurm(arguments: argparse.Namespace, job: Job) -> int:
    """Submits the job, and waits for the run when asked to; with ``--dry-run`` prints the batch script instead."""
    if arguments.dry_run:
        from clusterddp.slurm.batch import batch_script

        run = choose_run_directory(arguments.run_dir, job)
        print(batch_script(fit_to_cluster(job, required=False), run, Path.cwd()))
        return 0
    run, job_id = submit_to_slurm(job, arguments.run_dir, _plant_of(arguments, job))
    if not sys.stdout.isatty():
        print(job_id, flush=True)
    show(f"see its state with: clusterddp status {run.quoted}")
    if arguments.debug is not None:
        from clusterddp.cli.steering.shell import debug

        return debug(run, arguments.debug)
    if arguments.wait or arguments.follow:
        try:
            from clusterddp.cli.runs.watch import watch

            return watch([run], follow=arguments.follow)
        except KeyboardInterrupt:  # before the watch began
            show(f"the run continues; watch it with: clusterddp watch {run.quoted}")
            return INTERRUPTED
    return 0


def ended(run: RunDirectory, code: int, how: str) -> int:
    """Says how to continue a run that is not over; returns the exit code, as a shell has it for a signal."""
    if code < 0:
        say(f"the supervisor was killed by signal {-code}, and its ranks ended with it; check memory")
    if (code < 0 or code == INTERRUPTED) and run.outcome() is None:
        show(f"stopped; continue with: {how}")
    return code if code >= 0 else 128 - code


def _plant_of(arguments: argparse.Namespace, job: Job) -> Plant | None:
    """``fork_of``, and the rank to debug."""
    forks, rank = fork_of(arguments), arguments.debug
    if rank is None:
        return forks
    if not 0 <= rank < job.world_size:
        raise UsageError(f"--debug {rank}: the job has the ranks 0 to {job.world_size - 1}")

    def plant(run: RunDirectory) -> None:
        if forks is not None:
            forks(run)
        write_json(run.debug_file, {"rank": rank}, mode=0o600)

    return plant


def fork_of(arguments: argparse.Namespace) -> Plant | None:
    """Copies the checkpoint that ``--fork`` names into the new run, if it is given."""
    return (lambda run: show(fork.plant(arguments.fork, run))) if arguments.fork else None
