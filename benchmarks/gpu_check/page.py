"""docs/measurements/gpu-check.md: what is run, in which order and for how long, and the results of a GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import report, rows
from benchmarks.gpu_check.case import REPOSITORY, Sizes
from benchmarks.gpu_check.plan import ASSUMED, cases

FOLDER = REPOSITORY / "docs" / "measurements"
NAME = "gpu-check"


def main(out: Path | None) -> int:
    """Writes the page, with the results in ``out`` or without any; returns the exit code."""
    if out is None:
        (FOLDER / f"{NAME}.md").write_text(text(None) + "\n")
        return 0
    record = json.loads(out.read_text())
    if record["on"] == "stand-in":
        print(f"{out} has results of a stand-in, which are no measurements of a GPU: no page", file=sys.stderr)
        return 2
    figures = {name: value for name, value in record.items() if name != "machine"}
    report.write(FOLDER, NAME, text(record), figures)
    return 0


def text(record: Mapping[str, Any] | None) -> str:
    """The page. ``record``: the file of ``--out``."""
    full = Sizes()
    plan = [(case, case.bound_s(ASSUMED, full)) for case in cases(1)]
    expected = sum(case.expected_s(ASSUMED, full) for case, _ in plan)
    table = report.table(
        ["", "case", "a pass shows that", "starts of ranks", "about", "at most"],
        [
            [number, case.name, case.shows, case.starts, f"{case.expected_s(ASSUMED, full):.0f} s", f"{bound:.0f} s"]
            for number, (case, bound) in enumerate(plan, 1)
        ],
    )
    return f"""\
# What needs a GPU

`python3 -m benchmarks.gpu_check --out gpu.json` runs the cases below in this order, the most valuable first. It needs
one GPU and a torch with CUDA, and neither a network nor Slurm nor an installation: it runs from a source tree.
`--wheels FOLDER` installs packages that are missing from wheels there, for this call only. `make gpu-check` does the
same in `.venv`.

- Each case is a process with children of its own, which are all killed when its time is over.
- A call stops itself after nine minutes (`--budget SECONDS`). The results are written after each case, and the same
  command again continues with the cases that have none. `--only`, `--again` and `--list` choose cases.
- `python -m benchmarks.gpu_check --page --out gpu.json` writes this page from the results.
- With one GPU, NCCL runs with one rank. On a machine with more, each case uses all of them.
- `make gpu-check-stand-in` runs the cases at small sizes on the tests' pretend devices. It shows that the cases work.
  Its results are marked, as are those of reduced sizes (`--size state_gb=5`). Neither counts as a measurement.

## Order and time

The call first measures how long a rank takes to start and how fast device memory is copied, host memory is filled and
the disk is written. A case is expected to take (start + 2 s) for each start of ranks, a constant, and the time of its
gigabytes at these three speeds. It is killed after 10 s and three times that. The table is for a start of
{ASSUMED.start_s:g} s, copies of {ASSUMED.copy:g} GB/s, and {ASSUMED.fill:g} GB/s for memory and disk: about
{expected / 60:.0f} minutes in total, so two or three calls.

{table}

## Results

{_results(record) if record else "Not yet run on a GPU."}"""


def _results(record: Mapping[str, Any]) -> str:
    facts = record["facts"]
    lines = []
    for result in record["cases"].values():
        state = result["state"] + (f" (reduced: {', '.join(result['reduced'])})" if result["reduced"] else "")
        lines.append([result["name"], state, " ".join(result["words"].split()).replace("|", "/"), result["seconds"]])
    where = f"{facts['gpus']} x {facts['gpu']}, CUDA {facts['cuda']}, NCCL {facts['nccl']}, torch {facts['torch']}"
    speeds = ", ".join(f"{name} {value:.3g}" for name, value in facts["speeds"].items())
    found = f"{where}, {record['date']}. Measured before the cases: {speeds}.\n\n"
    found += report.table(["case", "result", "finding", "seconds"], lines)
    return found + (f"\n\n{rows.table(record['rows'])}" if record["rows"] else "")
