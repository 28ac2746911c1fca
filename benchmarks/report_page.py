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
    """Measures, and writes its results."""
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
        "rows": table_rows(*map(list, zip(*beside, strict=True))),
    }
    head = ["report on", "seconds, median", "longest", "CPU seconds", "most memory, MB", "size, kB"]
    lines = [
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
    text = f"""# What a report costs

Reports of a simulated run of {STEPS:,} steps, {RANKS} ranks and {ATTEMPTS} attempts, and of {MEMBERS} runs of
{MEMBER_STEPS:,} steps and {MEMBER_ATTEMPTS} attempts, {REPEATS} of each kind, each by a new process, whose largest
resident set is the memory."""
    report.write(options.out, "report", text, figures, tables={"All reports": report.table(head, lines)})


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


def table_rows(costs: list[Cost], limits: list[Cost]) -> list[dict[str, Any]]:
    """For the common table."""
    name, words = f"report on {STEPS:,} steps", "a process that parses the same files"
    cpu = [[cost.cpu_s for cost in side] for side in (costs, limits)]
    memory = [[cost.memory / 1e6 for cost in side] for side in (costs, limits)]
    page, least = [cost.output / 1e3 for cost in costs], report.median(memory[1])
    return [
        rows.paired(f"{name}, CPU", "s", cpu[0], cpu[1], words, allowed=MOST_S / report.median(cpu[1])).as_json(),
        rows.paired(f"{name}, memory", "MB", memory[0], memory[1], words, allowed=MOST_MEMORY / 1e6 / least).as_json(),
        rows.counted(f"{name}, page", "kB", max(page), MOST_BYTES / 1e3, "500 kB", allowed=1.0).as_json(),
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


if __name__ == "__main__":
    main()
