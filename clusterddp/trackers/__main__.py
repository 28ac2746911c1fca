"""``python -m clusterddp.trackers RUN``: sends the missing values of a run that is over to its trackers.

For a run that has completed while a tracker's server was down. A run that continues does this by itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from clusterddp.entry import exit_with
from clusterddp.errors import RunDirectoryError, UsageError
from clusterddp.history.beginnings import Resumed
from clusterddp.history.checkpoints import Checkpoint
from clusterddp.jobdef.load import load_resolved
from clusterddp.jobdef.tracking import check_packages, wanted
from clusterddp.reporter import in_words, say
from clusterddp.rundir.ownership import check_run
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.trackers.delivery import read_sent
from clusterddp.trackers.follower import Orders, follow
from clusterddp.trackers.registry import TRACKERS


def send_rest(*arguments: str) -> int:
    """Sends the values of all steps below the run's last checkpoint to each of its trackers."""
    if len(arguments) != 1:
        raise UsageError("usage: python -m clusterddp.trackers RUN, with a run directory")
    run = RunDirectory(arguments[0])
    check_run(run)
    if not run.exists() or (outcome := run.outcome()) is None:
        raise RunDirectoryError(
            f"{run} holds no run that has ended. A run that continues sends the missing values automatically"
        )
    job = load_resolved(run.job_file)
    check_packages(job)
    trackers = wanted(job, run.path.name, os.environ)
    if not trackers:
        raise UsageError(f"{run} has no trackers. Set one of {', '.join(TRACKERS)} in {run.job_file}")
    saved = [event.step for event in run.history() if isinstance(event, (Checkpoint, Resumed))]
    committed = saved[-1] if saved else 0
    if committed == 0:
        say(f"sent no values, because only steps below a checkpoint are sent and {run} has no such step")
        return 0
    orders = Orders(committed)
    orders.ended = orders.clean = True
    orders.complete = outcome.completed
    codes = [_send(name, run, options, orders) for name, options in trackers.items()]
    return max(codes)


def _send(name: str, run: RunDirectory, options: Mapping[str, Any], orders: Orders) -> int:
    sent = read_sent(run.path / name)
    try:
        if sent is None or sent.step < orders.committed:
            follow(name, run, run.newest_attempt() or 0, options, orders, sys.stderr)
    except Exception as error:  # of any kind: the tracker's package raised it
        say(f"{TRACKERS[name].name}: {in_words(error)}")
        return 1
    say(f"{TRACKERS[name].name} has all steps below {orders.committed}")
    return 0


if __name__ == "__main__":
    exit_with(lambda: send_rest(*sys.argv[1:]))
