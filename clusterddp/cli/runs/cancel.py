"""``clusterddp cancel``: ends runs for good."""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from clusterddp.checkpoint.store import of_run
from clusterddp.cli.runs.confirmation import agreed, can_ask
from clusterddp.errors import FAILED, ClusterddpError, RunDirectoryError, SlurmError, UsageError
from clusterddp.process import process_start, signal_ranks
from clusterddp.reporter import counted, put, say, show, what_failed
from clusterddp.rundir.find import find_runs, names_exactly
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm import commands as slurm
from clusterddp.slurm.cause import Cause
from clusterddp.supervisor.controller import give_notice
from clusterddp.supervisor.history import History
from clusterddp.supervisor.lease import held_by_other, holders, reachable
from clusterddp.supervisor.messages import at_step, over_already

TIMEOUT_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``cancel``."""
    parser.add_argument("run", nargs="+", metavar="RUN", help="run directories, folders of runs, or quoted patterns")
    parser.add_argument("--yes", action="store_true", help="cancel several runs, or those of a folder, without asking")


def run(arguments: argparse.Namespace, _: object) -> int:
    """Cancels the runs, and prints the final state of each; returns 0 if all are over."""
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
        show("nothing was cancelled")
        return FAILED
    return 0 if _cancel(live) and not unreadable else FAILED


def _confirmed(runs: Sequence[RunDirectory]) -> bool:
    """Lists the runs and asks; without a terminal it needs ``--yes``."""
    if not can_ask():
        raise UsageError(f"cancel: {counted(len(runs), 'run')} to cancel and no terminal to ask on: add --yes")
    for run in runs:
        show(str(run))
    return agreed(f"cancel {counted(len(runs), 'run')} for good?")


def _cancel(runs: Sequence[RunDirectory]) -> bool:
    """Ends all runs before it waits for any; prints how each ended, and returns whether all did."""
    failed: list[RunDirectory] = []
    for work in (_begin, _report):
        for run in runs:
            try:
                if run not in failed:
                    work(run)
            except ClusterddpError as error:
                failed.append(run)
                begun = isinstance(error, SlurmError) and run.cancelled
                say(
                    f"{run} will not run again, but has not ended; cancel it once more: {error}"
                    if begun
                    else str(error)
                )
            except OSError as error:  # another user's run, a full disk: the other runs are cancelled all the same
                if len(runs) == 1:
                    raise
                failed.append(run)
                say(f"{run} was not cancelled: {what_failed(error)}")
    return not failed


def _report(run: RunDirectory) -> None:
    final = _finish(run)
    put(f"{run}: {final['state']}{at_step(final['step'])}; it will not run again")
    if of_run(run).candidates():
        show(f"to continue from its newest checkpoint in a new run: clusterddp submit --fork {run.quoted}")


def cancel_run(run: RunDirectory) -> dict[str, Any]:
    """Marks the run as cancelled, so that nothing starts it again, ends its job or processes, and waits.

    Returns the outcome.
    """
    _begin(run)
    return _finish(run)


def _begin(run: RunDirectory) -> None:
    """Marks the run as cancelled, and ends its job or processes."""
    for entry in holders(run):
        if entry["kind"] == "slurm" and not reachable(entry):
            raise RunDirectoryError(f"{run} is {held_by_other(run)}: cancel it on that cluster")
    run.mark_cancelled()
    for entry in holders(run):
        _end_holder(entry, run)


def _finish(run: RunDirectory) -> dict[str, Any]:
    """Waits until nothing trains the run; returns the outcome."""
    held = _await_end(run)
    if held:
        text = f"{run} is cancelled and will not run again, but is still {held}"
        raise RunDirectoryError(text if "cannot be reached" in held else f"{text}: it is being ended")
    if run.outcome() is None:  # no supervisor wrote it: the run was queued, or was killed
        History(run, max(run.attempts(), default=0), printed=False).conclude("cancelled", "cancelled")
    return run.outcome() or {"state": "cancelled", "step": None}  # on a full disk the mark must do


def _end_holder(entry: Mapping[str, Any], run: RunDirectory) -> None:
    """Ends a job, or signals a local run, unless it has ended already."""
    if entry["kind"] == "slurm":
        job = slurm.show_job(entry["job"])
        if job is not None and job.live:
            slurm.cancel(entry["job"])
    elif reachable(entry) and process_start(entry["pid"]) == entry["process_start"]:
        give_notice(run, Cause.CANCELLED)
        signal_ranks(entry["pid"], signal.SIGTERM)


def _await_end(run: RunDirectory) -> str | None:
    """Waits for the holders to end; returns who still holds the run after a minute."""
    deadline = time.monotonic() + TIMEOUT_S
    while (held := held_by_other(run)) and time.monotonic() < deadline and any(map(reachable, holders(run))):
        time.sleep(0.1)
    return held
