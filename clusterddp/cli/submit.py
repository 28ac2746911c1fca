"""``clusterddp submit``, also ``python -m clusterddp.submit``: from a script or a job definition to a run or a sweep.

Does not import torch, to answer at once and spare the login node.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from clusterddp.cli.options import add_arguments as add_arguments
from clusterddp.cli.options import check_combinations, read_sweep, resolve_job
from clusterddp.environment import in_batch_step
from clusterddp.errors import FAILED, INTERRUPTED, STOPPED, UNCONFIRMED, SlurmError, UsageError
from clusterddp.jobdef.job import Job
from clusterddp.protocol import PREEMPT
from clusterddp.reporter import counted, duration, enumerated, put, say, show
from clusterddp.rundir.run_directory import RunDirectory, as_typed, runs_folder
from clusterddp.runs import recording, sweep_submission
from clusterddp.runs.progress_display import Progress, Shown
from clusterddp.runs.submission import (
    check,
    check_ranks,
    fit_to_cluster,
    packed_environment,
    record_local,
    submit_to_slurm,
)
from clusterddp.runs.sweep_members import Definition, argument_of, default_name, jobs_of, keys_of, named, of_options
from clusterddp.runs.sweep_submission import Sweep, SweepFolder, check_marks, make_plan, planned, tell
from clusterddp.slurm.commands import scrub_job_variables
from clusterddp.supervisor import lease


def run(arguments: argparse.Namespace, script_arguments: Sequence[str] | None) -> int:
    """Runs ``submit`` and returns the exit code. ``script_arguments`` is None if there was no ``--``."""
    definition = read_sweep(arguments)
    check_combinations(arguments, definition)
    os.umask(os.umask(0) & 0o077)  # one that denies the user access (277) would stop the run and Slurm's log
    if not arguments.here:
        scrub_job_variables()
    job = resolve_job(arguments, script_arguments, definition)
    if arguments.debug is not None and not 0 <= arguments.debug < job.world_size:
        raise UsageError(f"--debug {arguments.debug}: the job has {counted(job.world_size, 'rank')}, numbered from 0")
    if arguments.sweep or definition:
        return submit_sweep(arguments, job, definition)
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
    """The option that decides where the ranks run, or None for a Slurm job."""
    return "--local" if arguments.local else "--here" if arguments.here else None


def submit_local(arguments: argparse.Namespace, job: Job) -> int:
    """Runs the job on this machine, and waits."""
    from clusterddp.runs.local import LocalRun, Moment

    preemptions = [Moment.parse(one) for one in json.loads(os.environ.pop(PREEMPT, "[]"))]
    run = record_local(job, arguments.run_dir, recording.Content(fork=arguments.fork))
    local = LocalRun(run, job, preemptions, arguments.debug)
    with Progress(
        run, job.steps, job.progress_interval, Shown(progress=arguments.debug is None, failures=False)
    ) as progress:
        code = local.loop(progress)
    with suppress(OSError):  # the disk may be full, and the entry then names a process that no longer runs
        lease.loop_ended(run)
    if code in (0, UNCONFIRMED) and local.missed:
        say(f"the run completed, but without the preemption {', '.join(map(str, local.missed))}. The exit code is 1")
        return FAILED
    return ended(run, code, f"clusterddp submit --local --run-dir {run.quoted}")


def submit_here(job: Job, run_dir: str | None, changed: bool) -> int:
    """Runs the job in the surrounding allocation. An existing run directory continues its run.

    In a batch step, this process becomes the supervisor. In salloc's shell, it shows progress and waits.
    """
    from clusterddp.runs.local import AllocatedRun
    from clusterddp.slurm import allocation
    from clusterddp.slurm.batch import batch_script
    from clusterddp.supervisor.main import supervise_slurm

    present = recording.present_code(job, run_dir)
    run, created = recording.claim(run_dir, job)
    if changed or not run.exists():
        if run.exists():
            recording.check_not_held(run, lease.of_job(os.environ["SLURM_JOB_ID"]))
        content = recording.Content(code=present, environment=packed_environment(job, run.path.parent))
        with recording.recorded(run, job, created, content):
            jobs = allocation.as_allocated(job, os.environ)
            allocation.write_script(run, *(batch_script(each, run, Path.cwd()) for each in jobs))
    elif not in_batch_step(os.environ):  # a requeued batch step must not take the present code
        recording.check_not_held(run, lease.of_job(os.environ["SLURM_JOB_ID"]))
        recording.write_code(run, present)
    if in_batch_step(os.environ):
        return supervise_slurm(str(run))
    show(f"run directory: {run}")
    with Progress(run, job.steps, shown=Shown(failures=False)) as progress:
        code = AllocatedRun(run, job).loop(progress)
    return ended(
        run, code, f"clusterddp submit --here --run-dir {run.quoted}, or sbatch {shlex.quote(str(run.batch_script))}"
    )


def submit_slurm(arguments: argparse.Namespace, job: Job) -> int:
    """Submits the job, and waits for the run if asked to. With ``--dry-run``, prints the batch script instead, and with
    ``--when``, when the job may start."""
    if arguments.dry_run or arguments.when:
        from clusterddp.slurm.batch import batch_script

        run = recording.choose_run_directory(arguments.run_dir, job)
        job = fit_to_cluster(job, required=arguments.when)
        if arguments.when:
            return show_estimates(job, batch_script(replace(job, time_min_s=None), run, Path.cwd()))
        print(batch_script(job, run, Path.cwd()))
        return 0
    rank = arguments.debug
    run, job_id = submit_to_slurm(job, arguments.run_dir, recording.Content(fork=arguments.fork, debug_rank=rank))
    if not sys.stdout.isatty():
        print(job_id, flush=True)
    show(f"See the run's state with: clusterddp status {run.quoted}")
    tell_of_rehearsal(job)
    if rank is not None:
        from clusterddp.cli.steering import debug

        return debug(run, rank)
    if arguments.wait or arguments.follow:
        try:
            from clusterddp.runs.waiting import wait

            code = wait([run], resubmit=True, follow=arguments.follow)
        except KeyboardInterrupt:  # before the waiting began
            show(f"The run continues. Wait for it with: clusterddp wait --resubmit {run.quoted}")
            return INTERRUPTED
        return code if code in (0, UNCONFIRMED, INTERRUPTED) else FAILED
    return 0


def tell_of_rehearsal(job: Job) -> None:
    """Says if a script that may be preempted was not rehearsed as it is now, or did not survive its rehearsal."""
    from clusterddp.rehearsal.validity import remark
    from clusterddp.slurm.configuration import preemption

    if (words := remark(job)) is None:
        return
    partition, qos = job.partition or os.environ.get("SBATCH_PARTITION"), job.qos or os.environ.get("SBATCH_QOS")
    try:
        policy = preemption(partition, qos)
    except SlurmError:  # the job is submitted, whether or not Slurm answers once more
        return
    if policy.mode in ("REQUEUE", "CANCEL"):
        show(f"{policy.partition} preempts jobs, and {words}")


def show_estimates(job: Job, script: str) -> int:
    """Prints when Slurm expects to start the job. Returns 1 if it always refuses the job. ``script``: without
    ``time_min``, because each limit is asked for by itself."""
    from clusterddp.slurm.estimates import estimates

    show("Slurm's estimates are rough bounds: jobs that end early make the start earlier, and new jobs may delay it")
    starts = []
    for one in estimates(job, script):
        what = ", ".join(filter(None, (one.partition, one.limit))) or "without a partition and a limit"
        if one.start is None:
            put(f"{what}: refused: {one.refusal}")
            continue
        starts.append(one.start)
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.start))
        waits = duration(max(0.0, one.start - time.time()))
        put(f"{what}: {at}, in {waits}{f', on {one.nodes}' if one.nodes else ''}")
    return 0 if starts else FAILED


def ended(run: RunDirectory, code: int, how: str) -> int:
    """Prints how to continue a run that is not over. Returns the exit code, as a shell does for a signal."""
    if code < 0:
        say(f"the supervisor was killed by signal {-code} ({signal.strsignal(-code)}), and its ranks ended with it")
    if (code < 0 or code == INTERRUPTED) and run.outcome() is None:
        show(f"Stopped. Continue with: {how}")
    return code if code >= 0 else 128 - code


# --- sweeps


def submit_sweep(arguments: argparse.Namespace, job: Job, definition: Definition | None) -> int:
    """Submits or runs the missing members of a sweep. ``definition``: that of a file, None for ``--sweep``."""
    members = definition.members if definition else of_options(arguments.sweep)
    name = Path(arguments.target).stem if definition else default_name(job, keys_of(members))
    folder = SweepFolder(arguments.run_dir or runs_folder(os.environ) / name)
    by_name = named(members)
    if repeated := len(members) - len(by_name):
        show(f"ignoring {counted(repeated, 'repeated combination')}, because each combination runs once")
    jobs = dict(zip(by_name, jobs_of(job, list(by_name.values())), strict=True))
    check_marks(jobs.values())
    sweep = Sweep(folder, job, by_name, jobs, arguments.retry, arguments.change, arguments.max_running)
    if arguments.dry_run:
        return show_members(sweep)
    if arguments.local:
        return run_members(sweep)
    code = submit_members(sweep)
    tell_of_rehearsal(job)
    return code


def submit_members(sweep: Sweep) -> int:
    """Submits the members as job arrays and prints the job ids. The exit code is 75 if Slurm took only some of them."""
    with planned(sweep) as plan:
        tell(sweep, plan)
        if plan.is_new:
            tell_keys(sweep)
        done = sweep_submission.submit(sweep, plan)
    if not sys.stdout.isatty():
        print(*done.job_ids, sep="\n", end="\n" if done.job_ids else "", flush=True)
    if done.members:
        show(f"Submitted {counted(len(done.members), 'member')} as {enumerated('job', done.job_ids)}")
    show(f"See them with: clusterddp list {shlex.quote(as_typed(sweep.folder.path))}")
    if done.refused:
        left = counted(len(plan.submit) - len(done.members), "member")
        show(f"Slurm did not accept {left}: {done.refused}. Run the same command again to submit the rest")
        return STOPPED
    return 0


def run_members(sweep: Sweep) -> int:
    """Runs the members on this machine, one at a time, and returns the exit code."""
    for job in sweep.jobs.values():
        check_ranks(job, "--local")
    with planned(sweep) as plan:
        tell(sweep, plan)
        if plan.is_new:
            tell_keys(sweep)
    return sweep_submission.run_all(sweep, plan)


def show_members(sweep: Sweep) -> int:
    """Prints the members with their states, and the batch scripts on standard output."""
    sweep.folder.check()
    plan = make_plan(sweep)
    tell(sweep, plan)
    tell_keys(sweep)
    for name, state in plan.states.items():
        show(f"{state:>9}  {name}")
    if plan.submit:
        print("\n\n".join(sweep_submission.scripts(sweep, plan)))
    return 0


def tell_keys(sweep: Sweep) -> None:
    """Prints the meaning of each key of the members."""
    for key in keys_of(sweep.members.values()):
        if argument := argument_of(key):
            show(f"{key} is given to the script as {f'{argument}=' if sweep.job.hydra else f'--{argument}'}")
        else:
            named = f"{key}=" if sweep.job.hydra else f"--{key}"
            own = "" if "." in key else f". To set the script's own {named}, write args.{key}"
            show(f"{key} is a key of the job definition{own}")
