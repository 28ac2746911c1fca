"""``clusterddp resubmit`` and ``submit --wait``: do from a login node what a run's own job cannot.

After a requeue, Slurm holds the job, by default for two minutes. Its owner may lift the hold. A run is resubmitted if
its job ended without continuing it: its first node died and the job could not be requeued, scontrol is missing on the
nodes, or Slurm refused its next job. For a local run, the command only waits.
"""

from __future__ import annotations

import argparse

from clusterddp.rundir.run_directory import find_runs
from clusterddp.runs.waiting import wait_and_resubmit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``resubmit``."""
    parser.add_argument("run", nargs="+", metavar="RUN", help="run directories, folders of runs or patterns")


def run(arguments: argparse.Namespace, _: object) -> int:
    """Runs ``resubmit`` and returns the exit code."""
    return wait_and_resubmit(find_runs(arguments.run))
