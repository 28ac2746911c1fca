"""What a run asks of slurmctld while it trains: ``python -m benchmarks.controller`` (``make bench-controller``).

On the test cluster, two nodes with a rank each: how many questions about jobs slurmctld answers to a run in its first
minute, then in six minutes of undisturbed training, and in as many while `clusterddp resubmit` and `clusterddp status
--watch` run beside it, by sdiag. The bars: one a minute, as sites ask of their users, and 70 an hour with `resubmit`.
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

#: ``scontrol show job`` and squeue, which nothing else calls here.
QUESTIONS = "REQUEST_JOB_INFO(?:_SINGLE)?|REQUEST_JOB_USER_INFO"
#: What runs beside the training, by the name of the figure.
BESIDE = {"questions": [], "resubmit": [["resubmit"]], "views": [["status", "--watch"], ["status", "--watch"]]}
#: The pauses between the questions of a command have grown after this.
SETTLED_S = 300.0
#: From an attempt's start: what precedes training.
START_S = 60.0


def asked(sdiag: str) -> int:
    """How many such questions slurmctld has answered since its counters were reset."""
    by_type = sdiag.partition("by message type")[2].partition("by user")[0]
    found = re.findall(rf"^\s*(?:{QUESTIONS})\s*\(\s*\d+\)\s*count:(\d+)", by_type, re.MULTILINE)
    return sum(map(int, found))


def measure(minutes: float) -> dict[str, Any]:
    """Questions in the first minute, and each minute afterwards."""
    with cluster(ClusterConfig(nodes=2, cpus=2)) as up:
        training = submit_training(up, folder_for(up, "run"), "--steps", "100000", "--pause", "0.5")
        up.root(["sdiag", "--reset"])
        started = until(lambda: start_of(training), "the attempt's start", 90)
        time.sleep(max(0.0, started + START_S - time.time()))
        at_start = count_and_reset(up)
        print(f"{at_start} in the first minute; {minutes:g} minutes follow", file=sys.stderr, flush=True)
        figures = {"slurm": up.version, "start": at_start, "seconds": 60 * minutes}
        for name, commands in BESIDE.items():
            beside = [up.popen([up.python, "-m", "clusterddp", *words, training.run.path]) for words in commands]
            if beside:  # which ask often at first
                time.sleep(SETTLED_S)
                figures[f"{name}_at_start"] = count_and_reset(up)
            time.sleep(60 * minutes)
            figures[name] = count_and_reset(up)
            for process in beside:
                process.terminate()
                process.wait()
        up.run([up.python, "-m", "clusterddp", "cancel", training.run.path], check=False)
        up.drain_jobs()
        return figures


def start_of(training: Training) -> float | None:
    return next(iter(event_times(list(read_lines(training.run.events_file)), "started", 0)), None)


def count_and_reset(up: Cluster) -> int:
    count = asked(up.run(["sdiag"]).stdout)
    up.root(["sdiag", "--reset"])
    return count


def table_rows(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """For the common table."""
    rate, beside = 60 * figures["questions"] / figures["seconds"], 3600 * figures["resubmit"] / figures["seconds"]
    name = "questions to slurmctld in a minute of training"
    watched = "the same in an hour, beside clusterddp resubmit"
    return [
        rows.counted(name, "", rate, 1.0, "one a minute", allowed=1.0).as_json(),
        rows.counted(watched, "", beside, 70, "70", allowed=1.0).as_json(),
    ]


def main() -> None:
    """Measures and writes the report."""
    parser = report.parser(__doc__, "3 minutes")
    parser.add_argument("--minutes", type=float, default=6)
    options = parser.parse_args()
    figures = measure(3 if options.quick else options.minutes)
    text = f"""# Questions to the controller

sdiag counted {figures["questions"]} questions in {figures["seconds"] / 60:.0f} minutes of training, after
{figures["start"]} in the first minute of the job. Beside `clusterddp resubmit` it counted {figures["resubmit"]} in as
many minutes, after {figures["resubmit_at_start"]} in the command's first five. Beside two terminals with
`clusterddp status
--watch` it counted {figures["views"]}, after {figures["views_at_start"]}.
[Why, and when it asks more often](../../docs/design/stopping.md)."""
    where = f"Slurm {figures['slurm']}, 2 simulated nodes on it"
    report.write(options.out, "controller", text, {**figures, "rows": table_rows(figures)}, where=where)


if __name__ == "__main__":
    main()
