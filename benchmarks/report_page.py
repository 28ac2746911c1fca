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
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks import report, rows
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
    output: int = 0


def main() -> None:
    """Measures, and writes docs/measurements/report.md."""
    parser = report.parser(__doc__, "only one run, not several laid over each other")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, run = Path(name), Path(name) / "run"
        # in another process: what a process has in memory before its exec counts as the command's
        with ProcessPoolExecutor(1, get_context("spawn")) as maker:
            maker.submit(make, folder, options.quick).result()
        sizes = {file.name: file.stat().st_size for file in sorted(run.glob("*.jsonl"))}
        beside = [(built(run, folder / "run.html"), read(run)) for _ in range(REPEATS)]
        costs = {"one run": [cost for cost, _ in beside]}
        if not options.quick:
            costs["one run, `--json`"] = [built(run, folder / "run.json", "--json") for _ in range(REPEATS)]
            costs[f"{MEMBERS} runs"] = [built(folder / "sweep", folder / "sweep.html") for _ in range(REPEATS)]
    figures = {
        "files": sizes,
        "costs": {name: [asdict(one) for one in found] for name, found in costs.items()},
        "limit": [asdict(limit) for _, limit in beside],
        "rows": table_rows(beside),
    }
    report.write(options.out, "report", text(sizes, costs), figures)


def make(folder: Path, only_one: bool) -> None:
    """The run directories."""
    long_run(folder / "run", ATTEMPTS, STEPS, RANKS)
    if only_one:
        return
    for index in range(MEMBERS):
        long_run(folder / "sweep" / f"member-{index}", MEMBER_ATTEMPTS, MEMBER_STEPS, RANKS)


def built(runs: Path, output: Path, *options: str) -> Cost:
    """Runs the command once."""
    command = [sys.executable, "-m", "clusterddp", "report", str(runs), "-o", str(output), *options]
    return replace(cost_of(command), output=output.stat().st_size)


def read(run: Path) -> Cost:
    """The limit: a process that reads the lines of the same files and parses them."""
    code = "import json, pathlib, sys\nfor path in pathlib.Path(sys.argv[1]).glob('*.jsonl'):\n"
    code += "    with open(path) as file:\n        lines = [json.loads(line) for line in file]\n"
    return cost_of([sys.executable, "-c", code, str(run)])


def table_rows(beside: list[tuple[Cost, Cost]]) -> list[dict[str, Any]]:
    """For the common table."""
    words = "a process that parses the same files"
    cpu = ([cost.cpu_s for cost, _ in beside], [limit.cpu_s for _, limit in beside])
    memory = ([cost.memory / 1e6 for cost, _ in beside], [limit.memory / 1e6 for _, limit in beside])
    name = f"report on {STEPS:,} steps"
    return [
        rows.paired(f"{name}, CPU", "s", *cpu, words, allowed=MOST_S / report.median(cpu[1])).as_json(),
        rows.paired(
            f"{name}, memory", "MB", *memory, words, allowed=MOST_MEMORY / 1e6 / report.median(memory[1])
        ).as_json(),
    ]


def cost_of(command: list[str]) -> Cost:
    """Of a process."""
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    cpu_s = used.ru_utime + used.ru_stime
    return Cost(time.monotonic() - began, cpu_s, used.ru_maxrss * 1024)


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
