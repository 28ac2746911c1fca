"""``clusterddp export``: writes a checkpoint's model to a file that torch or safetensors loads."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Literal

from clusterddp.checkpoint.store import of_run
from clusterddp.errors import CheckpointError, UsageError
from clusterddp.jobdef.job import Keep
from clusterddp.jobdef.load import load_resolved
from clusterddp.reporter import put
from clusterddp.rundir.run_directory import ONE_RUN, open_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``export``."""
    parser.add_argument("run", metavar="RUN", help=ONE_RUN)
    parser.add_argument(
        "step",
        nargs="?",
        type=_step,
        metavar="STEP",
        help="the checkpoint's number of steps, or best for ctx.run(best=...) or checkpoint.keep (default: the newest)",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a new .pt, .pth or .safetensors file")
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


def run(arguments: argparse.Namespace, _: object) -> int:
    """Runs ``export`` and returns the exit code."""
    if arguments.best and arguments.step not in (None, "best"):
        raise UsageError(f"--best and step {arguments.step} were given. Expected only one of them")
    step: int | Literal["best"] | None = "best" if arguments.best else arguments.step
    run = open_run(arguments.run)
    Path.cwd()  # raises if it was deleted, where torch's libraries would abort the process
    if not of_run(run).candidates():  # known before torch is imported, which takes seconds
        raise CheckpointError(f"{run} has no checkpoint")
    from clusterddp.checkpoint.weights_file import export

    keep = load_resolved(run.job_file).checkpoint.keep if step == "best" else Keep()
    put(export(run, arguments.file, arguments.part, step, everything=arguments.all, keep=keep))
    return 0
