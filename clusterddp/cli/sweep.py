"""``clusterddp sweep``, and ``submit --sweep``: a run per member, submitted as job arrays or run on this machine."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from clusterddp.cli.options import add_job_arguments, add_sweep_arguments, option_values, set_values
from clusterddp.errors import STOPPED, UsageError
from clusterddp.jobdef.job import Job
from clusterddp.reporter import counted, enumerated, show
from clusterddp.rundir.run_directory import as_typed, runs_folder
from clusterddp.runs import sweep_submission
from clusterddp.runs.submission import check_ranks, describe
from clusterddp.runs.sweep_folder import SweepFolder, default_name
from clusterddp.runs.sweep_members import Values, argument_of, jobs_of, keys_of, named, of_options, read_definition
from clusterddp.runs.sweep_submission import Plan, Sweep, check_marks, make_plan, planned, tell
from clusterddp.slurm.commands import scrub_own


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``sweep``. The arguments after ``--`` go to the script, before the values of the sweep."""
    parser.add_argument("target", metavar="SWEEP.yaml", help="what to vary, and the job definition")
    add_job_arguments(parser)
    sweep = parser.add_argument_group("sweep")
    sweep.add_argument(
        "--run-dir", metavar="DIR",
        help="the sweep's folder, with a run directory per member (default: $CLUSTERDDP_RUNS/NAME or ./runs/NAME, "
        "named after the file)",
    )  # fmt: skip
    add_sweep_arguments(sweep)
    sweep.add_argument("--change", action="store_true", help="submit members with a changed job definition")
    sweep.add_argument(
        "--dry-run",
        action="store_true",
        help="print the members and the batch scripts without submitting or writing anything",
    )
    sweep.add_argument("--local", action="store_true", help="run the members one at a time on this machine, and wait")
    parser.set_defaults(here=False)


def run(arguments: argparse.Namespace, script_arguments: Sequence[str] | None) -> int:
    """Runs ``sweep`` and returns the exit code."""
    os.umask(os.umask(0) & 0o077)
    scrub_own()
    path = Path(arguments.target)
    if path.suffix not in (".yaml", ".yml"):
        raise UsageError(f"{path}: expected SWEEP.yaml. To vary a script's arguments, use `clusterddp submit --sweep`")
    definition = read_definition(path)
    section = None if definition.job else "job"
    target, values = str(definition.job or path), option_values(arguments, script_arguments)
    job = describe(target, values, set_values(arguments), section=section)
    folder = arguments.run_dir or runs_folder(os.environ) / path.stem
    return carry_out(arguments, job, definition.members, folder)


def run_options(arguments: argparse.Namespace, job: Job) -> int:
    """Runs ``submit --sweep`` and returns the exit code."""
    members = of_options(arguments.sweep)
    folder = arguments.run_dir or runs_folder(os.environ) / default_name(job, keys_of(members))
    return carry_out(arguments, job, members, folder)


def carry_out(arguments: argparse.Namespace, job: Job, members: Sequence[Values], folder: str | Path) -> int:
    """Submits or runs the missing members of the sweep, and returns the exit code."""
    check_options(arguments.max_running, arguments.local)
    by_name = named(members)
    if repeated := len(members) - len(by_name):
        show(f"ignoring {counted(repeated, 'repeated combination')}, because each combination runs once")
    jobs = dict(zip(by_name, jobs_of(job, list(by_name.values())), strict=True))
    check_marks(jobs.values())
    sweep = Sweep(SweepFolder(folder), job, by_name, jobs, arguments.retry, arguments.change, arguments.max_running)
    if arguments.dry_run:
        return dry_run(sweep)
    if arguments.local:
        return run_here(sweep)
    return submit(sweep)


def check_options(max_running: int | None, local: bool) -> None:
    """Refuses ``--max-running`` below 1 or with ``--local``."""
    if max_running is not None and max_running < 1:
        raise UsageError(f"--max-running {max_running}: expected a number of at least 1")
    if max_running is not None and local:
        raise UsageError("--max-running cannot be combined with --local, which runs one member at a time")


def submit(sweep: Sweep) -> int:
    """Submits the members as job arrays and prints the job ids. The exit code is 75 if Slurm took only some of them."""
    with planned(sweep, sweep_submission.settle) as plan:
        tell(sweep, plan)
        if is_new(plan):
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


def run_here(sweep: Sweep) -> int:
    """Runs the members on this machine, one at a time, and returns the exit code."""
    for job in sweep.jobs.values():
        check_ranks(job, "--local")
    with planned(sweep, sweep_submission.settle) as plan:
        tell(sweep, plan)
        if is_new(plan):
            tell_keys(sweep)
    return sweep_submission.run_all(sweep, plan)


def dry_run(sweep: Sweep) -> int:
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


def is_new(plan: Plan) -> bool:
    """Whether no member has been submitted before."""
    return set(plan.states.values()) == {"new"} and not plan.left


def tell_keys(sweep: Sweep) -> None:
    """Prints the meaning of each key of the members."""
    for key in keys_of(sweep.members.values()):
        if argument := argument_of(key):
            show(f"{key} is given to the script as {f'{argument}=' if sweep.job.hydra else f'--{argument}'}")
        else:
            named = f"{key}=" if sweep.job.hydra else f"--{key}"
            own = "" if "." in key else f". To set the script's own {named}, write args.{key}"
            show(f"{key} is a key of the job definition{own}")
