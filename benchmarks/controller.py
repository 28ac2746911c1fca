"""What a run asks of slurmctld while it trains: ``python -m benchmarks.controller`` (``make bench-controller``).

On the test cluster, two nodes with a rank each: how many questions slurmctld answers to a run in its first minute, and
then in six minutes of undisturbed training, by sdiag. The bar: one a minute, as sites ask of their users.
"""

from __future__ import annotations

import re
import sys
import time
from typing import Any

from benchmarks import report, rows
from benchmarks.runs import cluster, event_times, folder_for, submit_training, until
from clusterddp.rundir.records import read_lines
from tests.cluster import Cluster, ClusterConfig
from tests.trainings import Training

#: ``scontrol show job JOB``, which nothing else sends here.
QUESTION = "REQUEST_JOB_INFO_SINGLE"
#: From an attempt's start: what precedes training.
START_S = 60.0


def asked(sdiag: str) -> int:
    """How many such questions slurmctld has answered since its counters were reset."""
    found = re.search(rf"^\s*{QUESTION}\s*\(\s*\d+\)\s*count:(\d+)", sdiag, re.MULTILINE)
    return int(found[1]) if found else 0


def measure(minutes: float) -> dict[str, Any]:
    """Questions in the first minute, and each minute afterwards."""
    with cluster(ClusterConfig(nodes=2, cpus=2)) as up:
        training = submit_training(up, folder_for(up, "run"), "--steps", "100000", "--pause", "0.5")
        up.root(["sdiag", "--reset"])
        started = until(lambda: start_of(training), "the attempt's start", 90)
        time.sleep(max(0.0, started + START_S - time.time()))
        at_start = count_and_reset(up)
        print(f"{at_start} in the first minute; {minutes:g} minutes follow", file=sys.stderr, flush=True)
        began = time.monotonic()
        time.sleep(60 * minutes)
        questions, seconds = count_and_reset(up), time.monotonic() - began
        up.run([up.python, "-m", "clusterddp", "cancel", training.run.path], check=False)
        up.drain_jobs()
        return {"slurm": up.version, "start": at_start, "questions": questions, "seconds": seconds}


def start_of(training: Training) -> float | None:
    return next(iter(event_times(list(read_lines(training.run.events_file)), "started", 0)), None)


def count_and_reset(up: Cluster) -> int:
    count = asked(up.run(["sdiag"]).stdout)
    up.root(["sdiag", "--reset"])
    return count


def table_rows(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """For the common table."""
    rate = 60 * figures["questions"] / figures["seconds"]
    name = "questions to slurmctld in a minute of training"
    return [rows.counted(name, "", rate, 1.0, "one a minute", allowed=1.0).as_json()]


def main() -> None:
    """Measures and writes the report."""
    parser = report.parser(__doc__, "3 minutes")
    parser.add_argument("--minutes", type=float, default=6)
    options = parser.parse_args()
    figures = measure(3 if options.quick else options.minutes)
    text = f"""# Questions to the controller

sdiag counted {figures["questions"]} calls of `scontrol show job` in {figures["seconds"] / 60:.0f} minutes of training,
after {figures["start"]} in the first minute of the job.
[Why, and when it asks more often](../../docs/design/stopping.md)."""
    where = f"Slurm {figures['slurm']}, 2 simulated nodes on it"
    report.write(options.out, "controller", text, {**figures, "rows": table_rows(figures)}, where=where)


if __name__ == "__main__":
    main()
