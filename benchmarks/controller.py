"""What a run asks of slurmctld while it trains: ``python -m benchmarks.controller`` (``make bench-controller``).

On the test cluster, two nodes with a rank each: how many questions about jobs slurmctld answers to a run in its first
minute, then in ten minutes of undisturbed training, and in as many beside six commands that watch the run, by sdiag.
The bars: one a minute, as sites ask of their users, and 70 an hour beside the commands.
"""

from __future__ import annotations

import re
import time

from benchmarks import report, rows
from benchmarks.runs import cluster, event_times, folder_for, submit_training, until
from clusterddp.rundir.records import read_lines
from tests.cluster import Cluster, ClusterConfig
from tests.trainings import Training

#: ``scontrol show job`` and squeue, which nothing else calls here.
QUESTIONS = "REQUEST_JOB_INFO(?:_SINGLE)?|REQUEST_JOB_USER_INFO"
#: The commands that watch the run.
BESIDE = [["wait", "--resubmit"], *[["wait"]] * 2, *[["status", "--watch"]] * 2, ["list", "--watch"]]
#: The pauses between the questions of a command have grown after this.
SETTLED_S = 300.0
#: From an attempt's start: what precedes training.
START_S = 60.0
TEXT = """# Questions to slurmctld

A run of two nodes trains for some minutes after its first one, alone, and beside commands that have run for five
minutes. sdiag counts calls of `scontrol show job` and squeue."""


def asked(sdiag: str) -> int:
    """How many such questions slurmctld has answered since its counters were reset."""
    by_type = sdiag.partition("by message type")[2].partition("by user")[0]
    found = re.findall(rf"^\s*(?:{QUESTIONS})\s*\(\s*\d+\)\s*count:(\d+)", by_type, re.MULTILINE)
    return sum(map(int, found))


def measure(quick: bool) -> report.Found:
    """Questions in the first minute, and each minute afterwards."""
    minutes = 3 if quick else 10
    with cluster(ClusterConfig(nodes=2, cpus=2)) as up:
        training = submit_training(up, folder_for(up, "run"), "--steps", "100000", "--pause", "0.5")
        up.root(["sdiag", "--reset"])
        started = until(lambda: start_of(training), "the attempt's start", 90)
        time.sleep(max(0.0, started + START_S - time.time()))
        at_start = count_and_reset(up)
        report.say(f"{at_start} in the first minute; {minutes} minutes follow")
        questions = [counted_beside(up, training, commands, minutes) for commands in ([], BESIDE)]
        up.run([up.python, "-m", "clusterddp", "cancel", training.run.path], check=False)
        up.drain_jobs()
    hourly = [60 * count / minutes for count in questions]
    name = "queries to slurmctld in a minute of training"
    found = [rows.counted(name, "", hourly[0] / 60, 1.0, "one a minute", allowed=1.0)]
    beside = "the same in an hour, beside resubmit, two wait, two status --watch and list --watch"
    found.append(rows.counted(beside, "", hourly[1], 70.0, "70", allowed=1.0))
    figures = {"start": at_start, "questions": questions, "seconds": 60 * minutes}
    return report.Found(figures, found, f"Slurm {up.version}")


def counted_beside(up: Cluster, training: Training, commands: list[list[str]], minutes: float) -> int:
    """The questions in so many minutes, while ``clusterddp`` runs with these words and the run's folder."""
    started = [up.popen([up.python, "-m", "clusterddp", *words, training.run.path]) for words in commands]
    if started:  # which ask often at first
        time.sleep(SETTLED_S)
    count_and_reset(up)
    time.sleep(60 * minutes)
    for process in started:
        process.terminate()
        process.wait()
    return count_and_reset(up)


def start_of(training: Training) -> float | None:
    return next(iter(event_times(list(read_lines(training.run.events_file)), "started", 0)), None)


def count_and_reset(up: Cluster) -> int:
    count = asked(up.run(["sdiag"]).stdout)
    up.root(["sdiag", "--reset"])
    return count


if __name__ == "__main__":
    report.main("controller", __doc__, TEXT, measure, "3 minutes of each")
