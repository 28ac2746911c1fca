"""What it costs to submit and to launch: ``python -m benchmarks.submission`` (``make bench-submission``), 3 minutes.

On the test cluster, two nodes with a rank each, in turns:

- Submission: ``python -m clusterddp.submit job.yaml`` and ``sbatch script``, of jobs that do not start yet: seconds
  until the command returns, and CPU seconds of it and its children (sbatch is one of ours).
- Launch: from the first line of the batch script to the first line of the script in a rank: of a run, and of a batch
  script that calls ``srun python`` with the same script, or ``srun date``. In ours, the supervisor starts in between,
  and the entry point of each rank.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import report, rows
from benchmarks.runs import cluster, in_folders, srun_script, stamp_line, stamps, until, write_definition
from benchmarks.sides import Cost, cost_of, in_turns
from tests.cluster import Cluster, ClusterConfig

WAIT_S = 60.0
#: Submitted jobs stay in the queue while they are measured.
LATER = "now+1hour"
TEXT = """# Submission and launch

Two nodes with a rank each are submitted and launched, in turns with sbatch and srun, by one user of an idle
controller."""


def submission(up: Cluster, command: list[Any], folder: Path) -> Cost:
    """What a command takes that the user runs."""
    with open(folder / "log", "w") as log:
        return cost_of(lambda: up.popen(command, cwd=up.source, stdout=log, stderr=log))


def our_submission(up: Cluster, folder: Path) -> Cost:
    write_definition(folder, stamp_script(up), str(folder), sbatch={"begin": LATER})
    submit = [up.python, "-m", "clusterddp.submit", folder / "job.yaml", "--run-dir", folder / "run"]
    return submission(up, submit, folder)


def bare_submission(up: Cluster, folder: Path) -> Cost:
    return submission(up, sbatch(up, batch_script(up, folder, "true"), f"--begin={LATER}"), folder)


def our_launch(up: Cluster, folder: Path) -> float:
    """Seconds from the batch script's first line to the script's."""
    write_definition(folder, stamp_script(up), str(folder), setup=[stamp_line(folder / "starts")])
    up.run([up.python, "-m", "clusterddp.submit", folder / "job.yaml", "--run-dir", folder / "run"], cwd=up.source)
    return launched(folder)


def bare_launch(up: Cluster, folder: Path) -> float:
    up.run(sbatch(up, batch_script(up, folder, srun_script(up, "stamp.py", folder))))
    return launched(folder)


def date_launch(up: Cluster, folder: Path) -> float:
    """``srun true``, which would not say when it ran."""
    srun = f"srun --cpus-per-task={up.config.cpus} bash -c 'date +%s.%N >> {folder}/script'"
    up.run(sbatch(up, batch_script(up, folder, srun)))
    return launched(folder)


def launched(folder: Path) -> float:
    """What the two stamps say."""
    first = until(lambda: len(found := stamps(folder / "script")) == 2 and min(found), "both ranks", WAIT_S)
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


def measure(quick: bool) -> report.Found:
    with cluster(ClusterConfig(nodes=2, cpus=2)) as up:
        launches = {"ours": our_launch, "bare": bare_launch, "date": date_launch}
        launch = in_turns(in_folders(up, launches), 5 if quick else 12)
        submissions = {"our-submission": our_submission, "bare-submission": bare_submission}
        ours, bare = in_turns(in_folders(up, submissions), 8 if quick else 20).values()
        up.drain_jobs()
    wall, cpu = ([[getattr(one, what) for one in side] for side in (ours, bare)] for what in ("wall_s", "cpu_s"))
    found = [
        rows.paired("submit: until the command returns", "s", wall[0], wall[1], "sbatch"),
        rows.paired("submit: CPU", "s", cpu[0], cpu[1], "sbatch"),
        rows.paired(
            "launch: batch script to first line", "s", launch["ours"], launch["bare"], "srun python of the same script"
        ),
        rows.paired("launch, beside `srun date`", "s", launch["ours"], launch["date"], "srun date"),
    ]
    figures = {"launches": launch, "submissions": [[asdict(one) for one in side] for side in (ours, bare)]}
    return report.Found(figures, found, f"Slurm {up.version}")


if __name__ == "__main__":
    report.main("submission", __doc__, TEXT, measure, "8 submissions and 5 launches of each kind")
