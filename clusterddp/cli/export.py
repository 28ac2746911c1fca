"""``clusterddp export``: writes a checkpoint's model to a file that torch or safetensors loads."""

from __future__ import annotations

import argparse
from pathlib import Path

from clusterddp.checkpoint.store import of_run
from clusterddp.errors import CheckpointError
from clusterddp.rundir.find import open_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``export``."""
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument("step", nargs="?", type=int, metavar="STEP", help="the checkpoint's step; default: the newest")
    parser.add_argument("file", type=Path, metavar="FILE", help="a new .pt, .pth or .safetensors file")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--part", metavar="NAME", help="its name in ctx.run(); default: model, or the only module")
    what.add_argument("--all", action="store_true", help="all parts: optimizer, scheduler and progress too")


def run(arguments: argparse.Namespace, _: object) -> int:
    """Carries out ``export``; returns the exit code."""
    run = open_run(arguments.run)
    Path.cwd()  # raises if it was deleted, where torch's libraries would abort the process
    if not of_run(run).candidates():  # known before torch is imported, which takes seconds
        raise CheckpointError(f"{run} has no checkpoint")
    from clusterddp.checkpoint.export import export

    print(export(run, arguments.file, arguments.part, arguments.step, everything=arguments.all))
    return 0
