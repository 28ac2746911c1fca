"""``clusterddp cancel``: ends runs for good."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from clusterddp.checkpoint.store import of_run
from clusterddp.errors import FAILED, ClusterddpError, SlurmError, UsageError
from clusterddp.events import at_step, over_already
from clusterddp.reporter import agreed, can_ask, counted, put, say, show, what_failed
from clusterddp.rundir.run_directory import RunDirectory, find_runs, names_exactly
from clusterddp.runs.requests import await_outcome, begin


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``cancel``."""
    parser.add_argument("run", nargs="+", metavar="RUN", help="run directories, folders of runs, or quoted patterns")
    parser.add_argument("--yes", action="store_true", help="cancel several runs, or those of a folder, without asking")


def run(arguments: argparse.Namespace, _: object) -> int:
    """Cancels the runs, and prints the final state of each. Returns 0 if all are over."""
    runs = find_runs(arguments.run)
    live, unreadable = [], False
    for run in runs:
        try:
            outcome = run.outcome()
        except (ClusterddpError, OSError) as error:
            if len(runs) == 1:
                raise
            unreadable = True
            say(f"{run} was not cancelled: {what_failed(error)}")
            continue
        if outcome is None:
            live.append(run)
        else:
            put(over_already(run, outcome))
    named = len(runs) == 1 and names_exactly(arguments.run[0], runs[0])
    if live and not named and not arguments.yes and not _confirmed(live):
        show("no run was cancelled")
        return FAILED
    return 0 if _cancel(live) and not unreadable else FAILED


def _confirmed(runs: Sequence[RunDirectory]) -> bool:
    """Lists the runs and asks. Without a terminal, ``--yes`` is required."""
    if not can_ask():
        raise UsageError(f"cancel: {counted(len(runs), 'run')} to cancel and no terminal to ask on. Add --yes")
    for run in runs:
        show(str(run))
    return agreed(f"cancel {counted(len(runs), 'run')} permanently?")


def _cancel(runs: Sequence[RunDirectory]) -> bool:
    """Ends all runs before it waits for any. Prints how each ended, and returns whether all did."""
    failed: list[RunDirectory] = []
    for work in (begin, _report):
        for run in runs:
            try:
                if run not in failed:
                    work(run)
            except ClusterddpError as error:
                failed.append(run)
                begun = isinstance(error, SlurmError) and run.cancelled
                say(f"{run} will not start again, but has not ended: {error}. Cancel it again" if begun else str(error))
            except OSError as error:  # such as another user's run or a full disk: the other runs are still cancelled
                if len(runs) == 1:
                    raise
                failed.append(run)
                say(f"{run} was not cancelled: {what_failed(error)}")
    return not failed


def _report(run: RunDirectory) -> None:
    final = await_outcome(run)
    put(f"{run}: {final['state']}{at_step(final['step'])}. The run will not start again")
    if of_run(run).candidates():
        show(f"To continue from its newest checkpoint in a new run, use: clusterddp submit --fork {run.quoted}")
