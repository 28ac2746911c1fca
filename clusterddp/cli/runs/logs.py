"""``clusterddp logs``: prints or follows a rank's output."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from clusterddp.cli.progress import Tail
from clusterddp.errors import RunDirectoryError
from clusterddp.rundir.find import open_run
from clusterddp.rundir.run_directory import RunDirectory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``logs``."""
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument("-f", "--follow", action="store_true", help="follow the output, across restarts, to the end")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="default: 0")
    parser.add_argument("--attempt", type=int, metavar="N", help="default: the newest attempt")


def run(arguments: argparse.Namespace, _: object) -> int:
    """Prints a rank's stdout to stdout and its stderr to stderr."""
    run, rank, attempt = open_run(arguments.run), arguments.rank, arguments.attempt
    if attempt is not None and attempt not in (made := run.attempts()):
        raise RunDirectoryError(f"{run} has no attempt {attempt}; available: {', '.join(map(str, made)) or 'none yet'}")
    number: int | None
    if arguments.follow and run.outcome() is None:
        number = run.newest_attempt() if attempt is None else attempt
    else:
        number, _path = find_log(run, rank, attempt)
    while True:
        number = _print_attempt(run, rank, number, arguments.follow and attempt is None)
        if number is None:
            return 0


def find_log(run: RunDirectory, rank: int, attempt: int | None) -> tuple[int, Path]:
    """The attempt (None: the newest) and the file of a rank's stdout; its stderr is beside it, as ``.err``."""
    number = run.newest_attempt() if attempt is None else attempt
    if number is None:
        raise RunDirectoryError(f"{run} has not started yet: no output; `clusterddp status {run}` shows its state")
    path = run.attempt_logs(number) / f"rank-{rank}.out"
    if not path.exists():
        raise RunDirectoryError(f"attempt {number} of {run} has no rank {rank}: {path} does not exist")
    return number, path


def _print_attempt(run: RunDirectory, rank: int, number: int | None, follow: bool) -> int | None:
    """Prints one attempt's output; with ``follow`` until a newer attempt starts, whose number is returned."""
    folder = run.attempt_logs(number) if number is not None else Path("/dev/null")
    tails = [(Tail(folder / f"rank-{rank}.out"), sys.stdout), (Tail(folder / f"rank-{rank}.err"), sys.stderr)]
    while True:
        newest, over = run.newest_attempt(), run.outcome() is not None
        for tail, stream in tails:
            for line in tail.lines():
                print(line, file=stream, flush=True)
        if newest != number:
            return newest if follow else None
        if over or not follow:
            return None
        time.sleep(0.2)
