"""``clusterddp bench``: submits a packaged benchmark and shows its output."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from clusterddp.cli import options, submit
from clusterddp.errors import UsageError

BENCHMARKS = Path(__file__).parents[1] / "bench"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``bench``: the name of a benchmark, and the options of ``submit``."""
    options.add_arguments(parser, "collectives", "the benchmark")


def run(arguments: argparse.Namespace, script_arguments: Sequence[str] | None) -> int:
    """Runs ``bench`` and returns the exit code."""
    names = sorted(path.stem for path in BENCHMARKS.glob("*.yaml"))
    if arguments.target not in names:
        given = f"unknown benchmark {arguments.target!r}" if arguments.target else "no benchmark given"
        raise UsageError(f"bench: {given}. Available: {', '.join(names)}")
    arguments.target = str(BENCHMARKS / f"{arguments.target}.yaml")
    arguments.follow = not (arguments.local or arguments.here or arguments.dry_run or arguments.sweep)
    return submit.run(arguments, script_arguments)
