"""``clusterddp cancel``: ends runs permanently."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from typing import Any

from clusterddp.errors import RunDirectoryError
from clusterddp.process import process_start, signal_ranks
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm import commands as slurm
from clusterddp.slurm.cause import Cause
from clusterddp.supervisor.controller import give_notice
from clusterddp.supervisor.history import History
from clusterddp.supervisor.lease import held_by_other, holders, reachable

TIMEOUT_S = 60.0


def cancel_run(run: RunDirectory) -> dict[str, Any]:
    """Marks the run as cancelled, to keep it from starting again, ends its job or processes, and waits.

    Returns the outcome.
    """
    begin(run)
    return await_outcome(run)


def begin(run: RunDirectory) -> None:
    """Marks the run as cancelled, and ends its job or processes."""
    for entry in holders(run):
        if entry["kind"] == "slurm" and not reachable(entry):
            raise RunDirectoryError(f"{run} is {held_by_other(run)}. Cancel it on that cluster")
    run.mark_cancelled()
    for entry in holders(run):
        _end_holder(entry, run)


def await_outcome(run: RunDirectory) -> dict[str, Any]:
    """Waits until no job or process trains the run. Returns the outcome."""
    held = _await_end(run)
    if held:
        text = f"{run} is cancelled and will not start again, but is still {held}"
        raise RunDirectoryError(text if "cannot be reached" in held else f"{text}, which is ending")
    if run.outcome() is None:  # no supervisor wrote it: the run was queued, or was killed
        History(run, max(run.attempts(), default=0), printed=False).conclude("cancelled", "cancelled")
    return run.outcome() or {"state": "cancelled", "step": None}  # on a full disk, the mark must suffice


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
    """Waits for the holders to end. Returns who still holds the run after a minute."""
    deadline = time.monotonic() + TIMEOUT_S
    while (held := held_by_other(run)) and time.monotonic() < deadline and any(map(reachable, holders(run))):
        time.sleep(0.1)
    return held
