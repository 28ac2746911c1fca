"""What it costs to submit and to launch: ``python -m benchmarks.submission`` (``make bench-submission``), 3 minutes.

On the test cluster, two nodes with a rank each, in turns:

- Submission: ``python -m clusterddp.submit job.yaml`` and ``sbatch script``, of jobs that do not start yet: seconds
  until the command returns, and CPU seconds of it and its children (sbatch is one of ours).
- Launch: from the first line of the batch script to the first line of the script in a rank: of a run, and of a batch
  script that calls ``srun python`` with the same script, or ``srun date``. In ours, the supervisor starts in between,
  and the entry point of each rank.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import report, rows
from benchmarks.runs import cluster, folder_for, srun_script, stamp_line, stamps, until, write_definition
from tests.cluster import Cluster, ClusterConfig

WAIT_S = 60.0
#: Submitted jobs stay in the queue while they are measured.
LATER = "now+1hour"
#: A submission's seconds, and its CPU seconds.
Cost = tuple[float, float]


def cost_of(up: Cluster, command: list[Any], folder: Path) -> Cost:
    """Of a command that the user runs."""
    with open(folder / "log", "w") as log:
        began = time.monotonic()
        process = up.popen(command, cwd=up.source, stdout=log, stderr=log)
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.monotonic() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, (folder / "log").read_text())
    return seconds, used.ru_utime + used.ru_stime


def our_submission(up: Cluster, folder: Path) -> Cost:
    write_definition(folder, stamp_script(up), str(folder), sbatch={"begin": LATER})
    submit = [up.python, "-m", "clusterddp.submit", folder / "job.yaml", "--run-dir", folder / "run"]
    return cost_of(up, submit, folder)


def bare_submission(up: Cluster, folder: Path) -> Cost:
    return cost_of(up, sbatch(up, batch_script(up, folder, "true"), f"--begin={LATER}"), folder)


def our_launch(up: Cluster, folder: Path) -> float:
    """Seconds from the batch script's first line to the script's."""
    write_definition(folder, stamp_script(up), str(folder), setup=[stamp_line(folder / "starts")])
    up.run([up.python, "-m", "clusterddp.submit", folder / "job.yaml", "--run-dir", folder / "run"], cwd=up.source)
    return launched(up, folder)


def bare_launch(up: Cluster, folder: Path) -> float:
    up.run(sbatch(up, batch_script(up, folder, srun_script(up, "stamp.py", folder))))
    return launched(up, folder)


def date_launch(up: Cluster, folder: Path) -> float:
    """``srun true``, which would not say when it ran."""
    srun = f"srun --cpus-per-task={up.config.cpus} bash -c 'date +%s.%N >> {folder}/script'"
    up.run(sbatch(up, batch_script(up, folder, srun)))
    return launched(up, folder)


def launched(up: Cluster, folder: Path) -> float:
    """What the two stamps say, once the job is over."""
    first = until(lambda: len(found := stamps(folder / "script")) == 2 and min(found), "both ranks", WAIT_S)
    until(lambda: not up.run(["squeue", "--noheader"]).stdout.strip(), "the job to end", WAIT_S)
    return float(first) - stamps(folder / "starts")[0]


def batch_script(up: Cluster, folder: Path, line: str) -> Path:
    script = folder / "bare.sbatch"
    script.write_text(
        f"#!/bin/bash\n{stamp_line(folder / 'starts')}\nexport OMP_NUM_THREADS={up.config.cpus}\n{line}\n"
    )
    return script


def sbatch(up: Cluster, script: Path, *options: str) -> list[Any]:
    size = ["--nodes=2", "--ntasks-per-node=1", f"--cpus-per-task={up.config.cpus}", "--partition=low"]
    return ["sbatch", "--parsable", *size, f"--output={script.with_suffix('.log')}", *options, script]


def stamp_script(up: Cluster) -> Path:
    return Path(up.source) / "benchmarks" / "scripts" / "stamp.py"


def in_turns(up: Cluster, kinds: dict[str, Callable[[Cluster, Path], Any]], repetitions: int) -> dict[str, list[Any]]:
    """What each kind took, in each repetition; the first, which fills caches, is left out."""
    found: dict[str, list[Any]] = {kind: [] for kind in kinds}
    for number in range(-1, repetitions):
        order = list(kinds) if number % 2 else list(reversed(kinds))
        for kind in order:
            report.say(f"{kind}: {number + 1} of {repetitions}")
            took = kinds[kind](up, folder_for(up, f"{kind}-{number + 1}"))
            found[kind] += [took] if number >= 0 else []
    return found


def measure(submissions: int, launches: int) -> dict[str, Any]:
    """All of it, on a cluster that is brought up for it."""
    with cluster(ClusterConfig(nodes=2, cpus=2)) as up:
        figures: dict[str, Any] = {"slurm": up.version}
        figures |= in_turns(up, {"our-launch": our_launch, "bare-launch": bare_launch, "date": date_launch}, launches)
        figures |= in_turns(up, {"our-submission": our_submission, "bare-submission": bare_submission}, submissions)
        up.drain_jobs()
    return figures


def table_rows(figures: dict[str, Any]) -> list[rows.Row]:
    """For the common table."""
    (wall, cpu), (bare_wall, bare_cpu) = (
        list(zip(*figures[kind], strict=True)) for kind in ("our-submission", "bare-submission")
    )
    launch, bare, date = (figures[kind] for kind in ("our-launch", "bare-launch", "date"))
    return [
        rows.paired("submit: until the command returns", "s", wall, bare_wall, "sbatch"),
        rows.paired("submit: CPU", "s", cpu, bare_cpu, "sbatch"),
        rows.paired("launch: batch script to first line", "s", launch, bare, "srun python of the same script"),
        rows.paired("launch, beside `srun date`", "s", launch, date, "srun date"),
    ]


def main() -> None:
    """Measures and writes the report."""
    parser = report.parser(__doc__, "8 submissions and 5 launches of each kind")
    parser.add_argument("--submissions", type=int, default=20)
    parser.add_argument("--launches", type=int, default=12)
    options = parser.parse_args()
    counts = (8, 5) if options.quick else (options.submissions, options.launches)
    figures = measure(*counts)
    text = """# Submission and launch

A submission and a launch beside those of sbatch and srun, with one user and an idle controller: on a busy one, sbatch
takes longer on either side."""
    found = [row.as_json() for row in table_rows(figures)]
    where = f"Slurm {figures['slurm']}, 2 simulated nodes on it"
    report.write(options.out, "submission", text, {**figures, "rows": found}, where=where)


if __name__ == "__main__":
    main()
