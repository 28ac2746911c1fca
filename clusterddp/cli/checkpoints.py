"""``clusterddp export``: writes a checkpoint's model to files that torch or safetensors loads.

``clusterddp prune``: deletes old checkpoints, code and logs of runs that are over, after asking.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from clusterddp.checkpoint.export import export
from clusterddp.errors import FAILED, ClusterddpError, UsageError
from clusterddp.jobdef.job import Keep
from clusterddp.jobdef.load import load_resolved
from clusterddp.reporter import agreed, can_ask, counted, put, say, show, what_failed
from clusterddp.rundir.run_directory import ONE_RUN, find_runs, open_run
from clusterddp.runs.pruning import Plan, delete_all, plan_for, size_text


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``export``."""
    parser.add_argument("run", metavar="RUN", help=ONE_RUN)
    parser.add_argument(
        "step",
        nargs="?",
        type=_step,
        metavar="STEP",
        help="the checkpoint's number of steps, or best for ctx.run(best=...) or checkpoint.keep (default: the newest)",
    )
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="a new .pt, .pth or .safetensors file, or a new folder for safetensors files of up to 5 GB with an index",
    )
    parser.add_argument("--best", action="store_true", help="alias for STEP=best")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--part", metavar="NAME", help="the part with this name in ctx.run() (default: model, or the only module)"
    )
    what.add_argument("--all", action="store_true", help="all parts, including optimizer, scheduler and progress")


def _step(text: str) -> int | Literal["best"]:
    if text == "best":
        return "best"
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"expected a number of steps, or best, got {text!r}")
    return int(text)


def run_export(arguments: argparse.Namespace, _: object) -> int:
    """Runs ``export`` and returns the exit code."""
    if arguments.best and arguments.step not in (None, "best"):
        raise UsageError(f"--best and step {arguments.step} were given. Expected only one of them")
    step: int | Literal["best"] | None = "best" if arguments.best else arguments.step
    run = open_run(arguments.run)
    Path.cwd()  # raises if it was deleted, where torch's libraries would abort the process
    keep = load_resolved(run.job_file).checkpoint.keep if step == "best" else Keep()
    put(export(run, arguments.file, arguments.part, step, everything=arguments.all, keep=keep))
    return 0


def add_prune_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``prune``."""
    parser.add_argument("run", nargs="+", metavar="RUN", help="run directories, folders of runs, or quoted patterns")
    parser.add_argument(
        "--keep-checkpoints",
        type=_at_least_one,
        default=1,
        metavar="N",
        help="number of newest checkpoints to keep in addition to the one with the best metric (default: 1)",
    )
    parser.add_argument(
        "--logs", action="store_true", help="also delete logs, except those of the first and the last attempt"
    )
    parser.add_argument("--yes", action="store_true", help="delete without asking")


def _at_least_one(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def run_prune(arguments: argparse.Namespace, _: object) -> int:
    """Prints what can be deleted, asks and deletes it. Returns 1 if a run was refused."""
    plans, refused = [], 0
    for run in find_runs(arguments.run):
        try:
            plan = plan_for(run, arguments.keep_checkpoints, arguments.logs)
        except (ClusterddpError, OSError) as error:  # such as a run that was deleted in the meantime
            say(what_failed(error))
            refused += 1
            continue
        _print(plan)
        if plan.files or plan.folders:
            plans.append(plan)
    if plans and _wanted(plans, arguments.yes):
        refused += delete_all(plans)
    return FAILED if refused else 0


# --- what is printed


def _print(plan: Plan) -> None:
    if not plan.files and not plan.folders:
        put(f"{plan.run} has nothing to delete")
        return
    put(f"{plan.run}: {size_text(plan.size)} to delete ({_kept(plan)})")
    for path, size in plan.files.items():
        put(f"  {size_text(size):>10}  {path.relative_to(plan.run.path)}")
    for path, size in plan.folders.items():
        put(f"  {size_text(size):>10}  {path.relative_to(plan.run.path)}/")


def _kept(plan: Plan) -> str:
    """``keeps checkpoints 900, 750``, at most five of them."""
    steps = [str(checkpoint.step) for checkpoint in plan.kept]
    if not steps:
        return "no checkpoint"
    shown = ", ".join(steps if len(steps) <= 5 else [*steps[:5], "..."])
    return f"keeps checkpoint {shown}" if len(steps) == 1 else f"keeps checkpoints {shown}"


# --- deleting


def _wanted(plans: Sequence[Plan], yes: bool) -> bool:
    """Whether to delete: by ``--yes``, or by an answer on the terminal."""
    names = ("files", "logs", "code")
    files, logs, code = (sum(len(getattr(plan, name)) for plan in plans) for name in names)
    parts = [counted(files, "checkpoint file")] if files else []
    parts += [f"the logs of {counted(logs, 'attempt')}"] if logs else []
    parts += [counted(code, "unused snapshot of the code", "unused snapshots of the code")] if code else []
    listed = f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]
    what = f"{listed} of {counted(len(plans), 'run')} ({size_text(sum(plan.size for plan in plans))})"
    if yes:
        return True
    if can_ask():
        return agreed(f"delete {what}?")
    show(f"No file was deleted. To delete {what}, add --yes")
    return False
