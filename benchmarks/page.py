"""The page of costs: ``python -m benchmarks.page`` fills in the tables of docs/measurements/README.md.

They are made from the JSON files there. Each row comes from the page of its own benchmark, or, where that has not been
measured yet, from ``make bench``. The page shows HEADLINES, and for each benchmark how many of its bars are met. The
README shows CHOICE. What is around the tables is written by hand, each table stands between two comments.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report, rows

FOLDER = Path("docs/measurements")
#: The figures that the README shows, and what they are called there.
CHOICE = {
    "hand-over: TERM to free nodes": "preemption: from TERM to free nodes",
    "resume: batch script to first step": "resume: from the batch script to the first step",
}
#: The figures of the page of costs.
HEADLINES = (
    *CHOICE,
    "no progress around a preemption, GraceTime=0",
    "wall time, a preemption every 60 s, GraceTime=0",
    "wall time, a rank killed (SIGKILL) every 90 s",
    "wall time, a node loses its power and stays off",
    "wall time, a rank stops (SIGSTOP)",
    "step of 10 ms: CPU of rank 0's training thread",
    "step of 10 ms: wall time",
    "step of 100 ms: CPU of rank 0's training thread",
    "step with the watchdog",
    "step with the stop agreement",
    "save, 400 MB: stall",
    "save, 400 MB: training time lost (all cores)",
    "restore, 400 MB, 8 ranks, warm",
    "questions to slurmctld in a minute of training",
)


def gathered(folder: Path) -> list[dict[str, Any]]:
    """All rows, each with the page it is from (``page``); of ``make bench``, those of benchmarks without one."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(path for path in folder.glob("*.json") if path.name != "bench.json"):
        found |= {row["row"]: {**row, "page": path.stem} for row in read(path)}
    measured = {row["page"] for row in found.values()}
    for row in read(folder / "bench.json"):
        if row["row"] not in found and row.get("benchmark") not in measured:
            found[row["row"]] = {**row, "page": "bench"}
    return list(found.values())


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that have the common form; other measurements have rows of other forms."""
    found = rows.read(path) if path.exists() else []
    return [row for row in found if isinstance(row, dict) and ("failed" in row or rows.problem(row) is None)]


def tables(found: Sequence[dict[str, Any]]) -> dict[str, str]:
    """By the name in its comments: the headlines, each benchmark's bars, the bars not met, and the README's choice."""
    chosen = sorted((row for row in found if row["row"] in HEADLINES), key=lambda row: HEADLINES.index(row["row"]))
    failures = [row for row in found if "failed" in row]
    shown = [[*rows.cells(row), f"[{row['page']}]({row['page']}.md)"] for row in [*chosen, *failures]]
    met = {
        row["page"]: [one["met"] for one in found if one["page"] == row["page"] and one.get("allowed")] for row in found
    }
    counts = [[f"[{name}]({name}.md)", str(len(bars)), str(bars.count(True))] for name, bars in sorted(met.items())]
    by_name = {row["row"]: rows.cells(row) for row in found if "failed" not in row}
    missed = {False: "missed", None: "cannot tell: the bar lies within the interval"}
    judged = [(row["row"], row["met"]) for row in found if row.get("allowed") is not None]
    return {
        "figures": report.table([*rows.HEAD, "from"], shown),
        "pages": report.table(["benchmark", "bars", "met"], counts),
        "bars": report.table(["row", "bar"], [[name, missed[met]] for name, met in judged if not met]),
        "choice": report.table(
            ["", "clusterddp", "limit", "ratio (95% interval)"],
            [[words, *by_name[name][1:4]] for name, words in CHOICE.items() if name in by_name],
        ),
    }


def filled(text: str, tables: dict[str, str]) -> str:
    """A page with these tables between their comments; without a table's comments, it has none of it."""
    for name, table in tables.items():
        begin, end = f"<!-- {name}: python -m benchmarks.page -->", f"<!-- end of {name} -->"
        if begin in text:
            before, _, rest = text.partition(begin)
            text = f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"
    return text


def write(folder: Path) -> None:
    """Both pages: the folder's, and the README two folders above, if there is one."""
    made = tables(gathered(folder))
    for file in (folder / "README.md", folder.resolve().parents[1] / "README.md"):
        if file.exists():
            file.write_text(filled(file.read_text(), made))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    write(parser.parse_args().folder)
