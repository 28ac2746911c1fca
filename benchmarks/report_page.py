"""What ``clusterddp report`` costs: ``python -m benchmarks.report_page`` (``make bench-report``), a minute.

Simulated run directories of the size that the page is made for. Each report is built by the command in a new process;
the kernel tells the most memory that it had.

The bars: one run is reported in less than 5 s and 500 MB, and every page is smaller than 500 kB.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

from benchmarks import report
from tests.long_run import long_run

STEPS, RANKS, ATTEMPTS = 100_000, 64, 50
MEMBERS, MEMBER_STEPS, MEMBER_ATTEMPTS = 30, 10_000, 5
REPEATS = 5
#: The bars: seconds and bytes of memory of one run, bytes of a page.
MOST_S, MOST_MEMORY, MOST_BYTES = 5.0, 500e6, 500e3


@dataclass(frozen=True)
class Cost:
    """What one report took. Sizes are bytes."""

    wall_s: float
    cpu_s: float
    memory: int
    output: int


def main() -> None:
    """Measures, and writes docs/measurements/report.md."""
    with tempfile.TemporaryDirectory() as name:
        folder, run = Path(name), Path(name) / "run"
        # in another process: what a process has in memory before its exec counts as the command's
        with ProcessPoolExecutor(1, get_context("spawn")) as maker:
            maker.submit(make, folder).result()
        sizes = {file.name: file.stat().st_size for file in sorted(run.glob("*.jsonl"))}
        costs = {
            "one run": [built(run, folder / "run.html") for _ in range(REPEATS)],
            "one run, `--json`": [built(run, folder / "run.json", "--json") for _ in range(REPEATS)],
            f"{MEMBERS} runs": [built(folder / "sweep", folder / "sweep.html") for _ in range(REPEATS)],
        }
    figures = {"files": sizes, "costs": {name: [asdict(one) for one in found] for name, found in costs.items()}}
    report.write(Path("docs/measurements"), "report", text(sizes, costs), figures)


def make(folder: Path) -> None:
    """The run directories."""
    long_run(folder / "run", ATTEMPTS, STEPS, RANKS)
    for index in range(MEMBERS):
        long_run(folder / "sweep" / f"member-{index}", MEMBER_ATTEMPTS, MEMBER_STEPS, RANKS)


def built(runs: Path, output: Path, *options: str) -> Cost:
    """Runs the command once."""
    began = time.monotonic()
    command = [sys.executable, "-m", "clusterddp", "report", str(runs), "-o", str(output), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    cpu_s = used.ru_utime + used.ru_stime
    return Cost(time.monotonic() - began, cpu_s, used.ru_maxrss * 1024, output.stat().st_size)


def met(costs: dict[str, list[Cost]]) -> bool:
    """Whether all of these stay below the bars."""
    one = costs["one run"]
    pages = [cost for name, found in costs.items() if "--json" not in name for cost in found]
    small = all(cost.output < MOST_BYTES for cost in pages)
    return small and all(cost.wall_s < MOST_S and cost.memory < MOST_MEMORY for cost in one)


def text(sizes: dict[str, int], costs: dict[str, list[Cost]]) -> str:
    """The report in Markdown."""
    head = ["report on", "seconds, median", "longest", "CPU seconds", "most memory, MB", "size, kB"]
    rows = [
        [
            name,
            report.median([cost.wall_s for cost in found]),
            report.worst([cost.wall_s for cost in found]),
            report.median([cost.cpu_s for cost in found]),
            round(report.worst([cost.memory for cost in found]) / 1e6),
            round(report.worst([cost.output for cost in found]) / 1e3),
        ]
        for name, found in costs.items()
    ]
    files = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in sizes.items())
    return f"""# What a report costs

{report.place()} `make bench-report`:
{REPEATS} reports of each kind, each by a new process. Memory is the resident set at its largest, interpreter included.
Where a report took longer than its CPU seconds, other processes used the machine.

One run: {STEPS:,} steps of three metrics, {RANKS} ranks on 8 hosts, {ATTEMPTS} attempts, of which all but the last
were preempted and every second one repeats steps ({files}).
{MEMBERS} runs: {MEMBER_STEPS:,} steps, {MEMBER_ATTEMPTS} attempts and {RANKS} ranks each, laid over each other.
The files are simulated; `timing.jsonl` is written by the supervisor's own code.

{report.table(head, rows)}

The bar, less than {MOST_S:.0f} s and {MOST_MEMORY / 1e6:.0f} MB for one run and {MOST_BYTES / 1e3:.0f} kB for a page,
is {report.verdict(met(costs))}."""


if __name__ == "__main__":
    main()
