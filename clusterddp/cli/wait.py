"""``clusterddp wait``: waits until runs are over, and reports the outcome as the exit code."""

from __future__ import annotations

import argparse
import re

from clusterddp.rundir.run_directory import find_runs
from clusterddp.runs.waiting import wait

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``wait``."""
    parser.add_argument("run", nargs="+", metavar="RUN", help="run directories, folders of runs, or quoted patterns")
    parser.add_argument(
        "--timeout", type=_seconds, metavar="TIME", help="timeout, such as 90s, 30m, 2h or 1d (default: no limit)"
    )
    parser.add_argument("--any", action="store_true", help="wait until one of the runs has ended, not all of them")
    parser.add_argument(
        "--resubmit",
        action="store_true",
        help="show the runs' events, lift the hold that Slurm puts on a requeued job, and resubmit a run whose job "
        "ended without continuing it",
    )


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhd])", text, re.ASCII)
    if not match:
        raise argparse.ArgumentTypeError(f"expected a time with its unit, such as 90s, 30m, 2h or 1d, got {text!r}")
    return float(match[1]) * _UNITS[match[2]]


def run(arguments: argparse.Namespace, _: object) -> int:
    """Runs ``wait`` and returns the exit code."""
    return wait(find_runs(arguments.run), arguments.timeout, arguments.any, arguments.resubmit)
