"""The page with figures of several benchmarks: ``python -m benchmarks.page``.

Fills in the tables of docs/measurements/README.md from the JSON files in benchmarks/results/. Each row is from
its own benchmark, or, where that has not been run alone, from ``make bench``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report, rows

PAGE = Path("docs/measurements/README.md")
#: The figures of the page of costs.
HEADLINES = (
    "hand-over: TERM to free nodes",
    "resume: batch script to first step",
    "no progress around a preemption, GraceTime=0",
    "wall time, a preemption every 60 s, GraceTime=0",
    "wall time, a rank killed (SIGKILL) every 90 s",
    "wall time, a node loses power and stays off",
    "wall time, a rank stops (SIGSTOP)",
    "a node is cut off, Slurm 22.05: detection to next new step",
    "a node loses power, Slurm 22.05: detection to next new step",
    "a node shuts down, Slurm 22.05: detection to next new step",
    "step of 10 ms: CPU of rank 0's training thread",
    "step of 10 ms: wall time",
    "step of 100 ms: CPU of rank 0's training thread",
    "step with the watchdog",
    "step with the stop agreement",
    "save, 400 MB: stall",
    "save, 400 MB: training time lost (all cores)",
    "restore, 400 MB, 8 ranks, warm",
    "queries to slurmctld in a minute of training",
)


def gathered(folder: Path) -> list[dict[str, Any]]:
    """All rows, each with its file (``from``); of ``make bench``, those of benchmarks that have no file."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(path for path in folder.glob("*.json") if path.name != "bench.json"):
        found |= {row["row"]: {**row, "from": path.stem} for row in rows.read(path)}
    alone = {row["from"] for row in found.values()}
    for row in rows.read(folder / "bench.json") if (folder / "bench.json").exists() else ():
        if row["row"] not in found and row.get("benchmark") not in alone:
            found[row["row"]] = {**row, "from": "bench"}
    return list(found.values())


def tables(found: Sequence[dict[str, Any]], folder: str) -> dict[str, str]:
    """By name: the headlines, each benchmark's bars, and the bars not met."""
    chosen = sorted((row for row in found if row["row"] in HEADLINES), key=lambda row: HEADLINES.index(row["row"]))
    failures = [row for row in found if "failed" in row]
    bars = [row for row in found if row.get("allowed") is not None]
    counts = []
    for name in sorted({row["from"] for row in bars}):
        met = [row["met"] for row in bars if row["from"] == name]
        counts.append([f"[{name}]({folder}/{name}.md)", len(met), *map(met.count, (True, False, None))])
    return {
        "figures": rows.table([*chosen, *failures]),
        "bars": report.table(["benchmark", "bars", "met", "missed", "undecided"], counts),
        "missed": report.table(rows.HEAD[:-1], [rows.cells(row)[:-1] for row in bars if row["met"] is False]),
    }


def write(page: Path = PAGE, folder: Path = report.RESULTS) -> None:
    report.fill(page, tables(gathered(folder), "../../benchmarks/results"))


if __name__ == "__main__":
    write()
