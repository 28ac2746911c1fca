"""The page with all figures: ``python -m benchmarks.page`` writes docs/measurements/README.md.

It is made from the JSON files there. Each row comes from the page of its own benchmark, or, where that has not been
measured yet, from ``make bench``. The README's table is a choice of these rows; ``tests/unit/test_figures_page.py``
compares both with the files, so that no figure in them can be older than its measurement.
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
    "step of 10 ms: CPU of rank 0's training thread": "CPU time of a training step",
    "save, 400 MB: stall": "training waits for a save of 400 MB",
    "hand-over: TERM to free nodes": "preemption: from TERM to free nodes",
    "resume: batch script to first step": "resume: from the batch script to the first step",
    "restore, 400 MB, 8 ranks, warm": "restore of 400 MB on 8 ranks",
    "wall time, a preemption every 60 s, GraceTime=0": "a run that is preempted every 60 s",
}
BEGIN, END = "<!-- figures: python -m benchmarks.page -->", "<!-- end of figures -->"
MANY_TENSORS = (
    "a thread of the rank writes the file's header and frees the state meanwhile, which takes 4 to 5 ms of CPU time"
)
#: Why a bar is missed, by a substring of the row's name; the first match counts.
REASONS = {
    "10,000 small tensors: training time lost (all cores), beside": MANY_TENSORS,
    "10,000 small tensors: training time lost (a core free)": MANY_TENSORS,
    "training time lost (all cores": "the threads of such training wait for each other, so a delay of one delays all; "
    "its page shows what an empty loop with the same CPU time costs, and a save with a core free",
    "step of 100 ms: CPU": "of what is above the bare loop, about 100 us are in run.log and 90 in the forward, twice "
    "as much as at 10 ms (40 and 35): the same code, in caches that are cold after the wait; its page has the profile",
}
UNDECIDED = "Cannot tell: the bar lies within the interval; more repetitions would narrow it."
GPU_ROWS = """## On GPUs

Not run: a step beside DDP alone, a save's stall and copies beside torch's, a state of 20 GB beside torch.save and
torch.load. [`make gpu-check`](gpu-check.md) measures them.
"""
NOT_FOR = """\
## When not to use clusterddp

- **Sharded models** (FSDP, tensor or pipeline parallelism): a checkpoint is rank 0's state, plus a small one per rank.
- **Without preemptions, time limits and long runs**: plain `srun python` starts sooner and has no supervisor. What
  clusterddp adds to a launch and to a step is above.
- **Steps far below 1 ms**: its work in each step would be a large part of them.
- **Elastic training**, in which ranks come and go within an attempt: a change of nodes is a new attempt here, which
  continues from a checkpoint.
- **Schedulers other than Slurm**: `--local` runs on one machine; Kubernetes, LSF and PBS are not supported.
- **GPUs, until measured**: these figures are of CPUs and gloo. `make gpu-check` runs what needs a GPU.
"""


def gathered(folder: Path) -> list[dict[str, Any]]:
    """All rows, each with the page it is from (``page``); of ``make bench``, those of benchmarks without one."""
    found: dict[str, dict[str, Any]] = {}
    pages = sorted(path for path in folder.glob("*.json") if path.name != "bench.json")
    for path in pages:
        found |= {row["row"]: {**row, "page": path.stem} for row in read(path)}
    measured = {row["page"] for row in found.values()}
    for row in read(folder / "bench.json"):
        if row["row"] not in found and row.get("benchmark") not in measured:
            found[row["row"]] = {**row, "page": "bench"}
    return list(found.values())


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that have the common form; older files have rows of other forms."""
    found = rows.read(path) if path.exists() else []
    return [row for row in found if isinstance(row, dict) and ("failed" in row or rows.problem(row) is None)]


def table(found: Sequence[dict[str, Any]]) -> str:
    """All rows, each with its page."""
    lines = [[*rows.cells(row), f"[{row['page']}]({row['page']}.md)"] for row in found]
    return report.table([*rows.HEAD, "from"], lines)


def choice(found: Sequence[dict[str, Any]]) -> str:
    """The README's table."""
    by_name = {row["row"]: row for row in found}
    lines = []
    for name, words in CHOICE.items():
        if (row := by_name.get(name)) is not None and "failed" not in row:
            _, ours, limit, ratio, _, _ = rows.cells(row)
            lines.append([words, ours, limit, ratio])
    return report.table(["", "clusterddp", "limit", "ratio (95% interval)"], lines)


def bars(found: Sequence[dict[str, Any]]) -> str:
    """The bars that are not met, those with the same reason together."""
    missed: dict[str, list[str]] = {}
    for row in found:
        if row.get("allowed") is not None and not row["met"]:
            reason = next((why for name, why in REASONS.items() if name in row["row"]), "no reason found yet")
            verdict = UNDECIDED if row["met"] is None else f"Missed: {reason}."
            missed.setdefault(verdict, []).append(f"- {row['row']}")
    verdicts = sorted(missed, key=lambda verdict: verdict == UNDECIDED)
    return "\n\n".join("\n".join([verdict, "", *missed[verdict]]) for verdict in verdicts) or "All bars are met."


def page(folder: Path) -> str:
    """The whole page."""
    found = gathered(folder)
    return f"""# What clusterddp costs

Written by `python -m benchmarks.page` from the JSON files beside it. CPUs and gloo on one machine, in the load that
each page names: no GPU, no network between nodes, no shared file system. The limit of a row was measured in turns with
ours, in the same run. It is what the machine, or the least program for the same job, takes. Only the ratio tells
something about another machine. An interval without width is that of a count, or of a single run, which says nothing of
its spread. Rows from `bench` have few repetitions.

{table(found)}

## Bars that are not met

{bars(found)}

{GPU_ROWS if not any(row["page"] == "gpu-check" for row in found) else ""}
## Beside other libraries

[Under faults](peers.md): the same training with seven launchers and libraries.
[Saves and restores](checkpoint-bench.md): torch, Lightning, accelerate. [Batches](input.md): torch's and torchdata's
loaders.

{NOT_FOR}
## The README's choice

{BEGIN}
{choice(found)}
{END}
"""


def fragment(text: str) -> str | None:
    """What is between the comments in a page; None without them."""
    if BEGIN not in text:
        return None
    return text.partition(BEGIN)[2].partition(END)[0].strip()


def filled(text: str, table: str) -> str:
    """A page with this table between its comments; unchanged without them."""
    if BEGIN not in text:
        return text
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"


def write(folder: Path) -> None:
    """The page; and the table in the README two folders above, if there is one with the comments for it."""
    (folder / "README.md").write_text(page(folder))
    readme = folder.resolve().parents[1] / "README.md"
    if readme.exists():
        readme.write_text(filled(readme.read_text(), choice(gathered(folder))))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    write(options.folder)


if __name__ == "__main__":
    main()
