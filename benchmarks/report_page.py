"""What ``clusterddp report`` costs: ``python -m benchmarks.report_page`` (``make bench-report``), a minute.

Simulated run directories of the size that the page is made for. Each report is built by the command in a new process;
the kernel tells the most memory that it had.

The bars: one run is reported in less than 5 s and 500 MB, and every page is smaller than 500 kB.
"""

from __future__ import annotations

import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks import report, rows
from benchmarks.sides import in_turns, of_python
from tests.long_run import long_run

STEPS, RANKS, ATTEMPTS = 100_000, 64, 50
MEMBERS, MEMBER_STEPS, MEMBER_ATTEMPTS = 30, 10_000, 5
REPEATS = 5
#: The bars: seconds and bytes of memory of one run, bytes of a page.
MOST_S, MOST_MEMORY, MOST_BYTES = 5.0, 500e6, 500e3
TEXT = f"""# `clusterddp report`

Reports of a simulated run of {STEPS:,} steps, {RANKS} ranks and {ATTEMPTS} attempts, and of {MEMBERS} runs of
{MEMBER_STEPS:,} steps. Each is built by a new process."""
READ = """
import json, pathlib, sys
for path in pathlib.Path(sys.argv[1]).rglob("*.jsonl"):
    with open(path) as file:
        lines = [json.loads(line) for line in file]
"""


def make(folder: Path, only_one: bool) -> None:
    """The run directories."""
    long_run(folder / "run", ATTEMPTS, STEPS, RANKS)
    for index in range(0 if only_one else MEMBERS):
        long_run(folder / "sweep" / f"member-{index}", MEMBER_ATTEMPTS, MEMBER_STEPS, RANKS)


def report_on(runs: Path, name: str, most: bool) -> tuple[list[rows.Row], dict[str, Any]]:
    """The rows of one report, beside a process that parses the same files."""
    output = runs.with_suffix(".html")
    sides = {
        "ours": lambda: of_python("-m", "clusterddp", "report", runs, "-o", output),
        "limit": lambda: of_python("-c", READ, runs),
    }
    costs = in_turns(sides, REPEATS, warm_up=0)
    cpu, memory = (
        {side: [scale * getattr(one, what) for one in found] for side, found in costs.items()} for what, scale in UNITS
    )
    bars = {"cpu": MOST_S, "memory": MOST_MEMORY / 1e6} if most else {"cpu": None, "memory": None}
    limit, page = "a process that parses the same files", output.stat().st_size / 1e3
    return [
        rows.paired(f"{name}, CPU", "s", cpu["ours"], cpu["limit"], limit, most=bars["cpu"]),
        rows.paired(f"{name}, memory", "MB", memory["ours"], memory["limit"], limit, most=bars["memory"]),
        rows.counted(f"{name}, page", "kB", page, MOST_BYTES / 1e3, "500 kB", allowed=1.0),
    ], {name: {side: [asdict(one) for one in found] for side, found in costs.items()}}


UNITS = (("cpu_s", 1.0), ("memory", 1e-6))


def measure(quick: bool) -> report.Found:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # in another process: what a process has in memory before its exec counts as the command's
        with ProcessPoolExecutor(1, get_context("spawn")) as maker:
            maker.submit(make, folder, quick).result()
        found, figures = report_on(folder / "run", f"report on {STEPS:,} steps", True)
        if not quick:
            more, others = report_on(folder / "sweep", f"report on {MEMBERS} runs", False)
            found, figures = found + more, figures | others
    return report.Found(figures, found)


if __name__ == "__main__":
    report.main("report", __doc__, TEXT, measure, "only one run, not several laid over each other")
