"""What a run asks of slurmctld while it trains: ``python -m benchmarks.controller`` (``make bench-controller``).

On the test cluster, two nodes with a rank each: how many questions slurmctld answers to a run in its first minute, and
then in six minutes of undisturbed training, by sdiag. The bar: one a minute, as sites ask of their users.
"""

from __future__ import annotations

import re
import time

from benchmarks import report, rows
from benchmarks.runs import cluster, event_times, folder_for, submit_training, until
from clusterddp.rundir.records import read_lines
from tests.cluster import Cluster, ClusterConfig
from tests.trainings import Training

#: ``scontrol show job JOB``, which nothing else sends here.
QUESTION = "REQUEST_JOB_INFO_SINGLE"
#: From an attempt's start: what precedes training.
START_S = 60.0
TEXT = """# Questions to slurmctld

A run of two nodes trains for some minutes after its first one. sdiag counts its calls of `scontrol show job`."""


def asked(sdiag: str) -> int:
    """How many such questions slurmctld has answered since its counters were reset."""
    found = re.search(rf"^\s*{QUESTION}\s*\(\s*\d+\)\s*count:(\d+)", sdiag, re.MULTILINE)
    return int(found[1]) if found else 0


def measure(quick: bool) -> report.Found:
    """Questions in the first minute, and each minute afterwards."""
    minutes = 3 if quick else 6
    with cluster(ClusterConfig(nodes=2, cpus=2)) as up:
        training = submit_training(up, folder_for(up, "run"), "--steps", "100000", "--pause", "0.5")
        up.root(["sdiag", "--reset"])
        started = until(lambda: start_of(training), "the attempt's start", 90)
        time.sleep(max(0.0, started + START_S - time.time()))
        at_start = count_and_reset(up)
        report.say(f"{at_start} in the first minute; {minutes} minutes follow")
        began = time.monotonic()
        time.sleep(60 * minutes)
        questions, seconds = count_and_reset(up), time.monotonic() - began
        up.run([up.python, "-m", "clusterddp", "cancel", training.run.path], check=False)
        up.drain_jobs()
    name = "questions to slurmctld in a minute of training"
    row = rows.counted(name, "", 60 * questions / seconds, 1.0, "one a minute", allowed=1.0)
    figures = {"start": at_start, "questions": questions, "seconds": seconds}
    return report.Found(figures, [row], f"Slurm {up.version}")


def start_of(training: Training) -> float | None:
    return next(iter(event_times(list(read_lines(training.run.events_file)), "started", 0)), None)


def count_and_reset(up: Cluster) -> int:
    count = asked(up.run(["sdiag"]).stdout)
    up.root(["sdiag", "--reset"])
    return count


if __name__ == "__main__":
    report.main("controller", __doc__, TEXT, measure, "3 minutes of training")
