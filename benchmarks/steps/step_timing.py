"""What step timing and ``run.log`` cost: ``python -m benchmarks.steps.step_timing``, 5 minutes.

``make bench-step-timing``. A run of two gloo ranks on this machine under ``submit --local``, in steps of
about 10 ms, in blocks of 50 steps: with
timing and logging (two calls of ``run.log``, four values), and without both. As in
``agreement.py``, the blocks are timed in pairs whose order alternates, next to pairs of two blocks without
(A/A). In further blocks, the CPU time of the training thread in each of their calls is added up.

The bar: at most 100 us of the training thread's CPU per step, for both together, on each rank.

For a script that does not use clusterddp, the hook that sees its optimizer's steps is measured the same way, in a run
of one rank whose step is that of an optimizer with a single number. The bar: at most 25 us more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report, rows
from benchmarks.steps.agreement import block_options

RANKS = 2
BAR_US, HOOK_BAR_US = 100.0, 25.0
#: Whether two of the values are reduced.
LOGGED = {"reduced": "with `reduce`", "plain": "without"}
SCRIPT, HOOK_SCRIPT = (Path(__file__).parents[1] / "scripts" / name for name in ("step_timing.py", "optimizer_hook.py"))
#: Steps of a block with the hook.
HOOK_STEPS = 500
REPOSITORY = Path(__file__).resolve().parents[2]
Block = Sequence[float]


def train(script: Path, folder: str, ranks: int, how: Sequence[str]) -> None:
    """A local run."""
    run = [sys.executable, "-m", "clusterddp", "submit", str(script), "--local", "--run-dir", f"{folder}/run"]
    shape = ["--device", "cpu", "--gpus", str(ranks), "--set", "progress=off"]
    done = subprocess.run([*run, *shape, "--", folder, *how], cwd=REPOSITORY)
    if done.returncode:
        sys.exit(f"the run ended with {done.returncode}")


def measure_hook(pairs: int) -> list[dict[str, float]]:
    """CPU microseconds of an optimizer's step, with the hook ("on") and without ("off")."""
    with tempfile.TemporaryDirectory() as folder:
        train(HOOK_SCRIPT, folder, 1, [str(pairs), str(HOOK_STEPS)])
        found: list[dict[str, float]] = json.loads(Path(folder, "hook.json").read_text())
        return found


def measure(pairs: int, steps: int, step_ms: float) -> list[list[dict[str, Any]]]:
    """The figures of each rank: a dictionary per pair of blocks."""
    with tempfile.TemporaryDirectory() as folder:
        how = ["--pairs", str(pairs), "--steps", str(steps), "--step-ms", str(step_ms)]
        train(SCRIPT, folder, RANKS, how)
        return [json.loads(Path(folder, f"rank-{rank}.json").read_text()) for rank in range(RANKS)]


def cpu_us(steps: int) -> Callable[[Block, Block], float]:
    """By how many microseconds of CPU per step one block takes longer than another."""
    return lambda one, other: 1e6 * (one[1] - other[1]) / steps


def wall_ratio(one: Block, other: Block) -> float:
    return one[0] / other[0]


def compared(figures: Sequence[dict[str, Any]], how: Callable[[Block, Block], float]) -> list[dict[str, float]]:
    """Of the pairs with and without, then of those without (A/A): the median and its 95% interval."""
    found = []
    for one, other in (("on", "off"), ("first", "second")):
        values = [how(pair[one], pair[other]) for pair in figures]
        low, high = report.bootstrap_interval(values)
        found.append({"median": report.median(values), "low": low, "high": high})
    return found


def summarized(ranks: Sequence[Sequence[dict[str, Any]]], steps: int) -> dict[str, Any]:
    """What follows from the figures."""
    calls = [in_calls(figures) for figures in ranks]
    return {
        "calls_us": calls,
        "difference_us": [compared(figures, cpu_us(steps)) for figures in ranks],
        "wall_ratio": compared(ranks[0], wall_ratio),
        "step_ms": 1000 * report.median([pair["off"][0] for pair in ranks[0]]) / steps,
        "met": all(found[kind]["both"] <= BAR_US for found in calls for kind in LOGGED),
    }


def in_calls(figures: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Microseconds of CPU per step in a rank's calls, for both ways of logging: medians of the blocks, and the most."""
    found = {}
    for kind in LOGGED:
        blocks = [pair[kind] for pair in figures]
        both = [block["timing"] + block["logging"] for block in blocks]
        medians = {name: report.median([block[name] for block in blocks]) for name in ("timing", "logging", "clock")}
        found[kind] = {**medians, "both": report.median(both), "most": report.worst(both)}
    return found


def _interval(found: dict[str, float], digits: int) -> str:
    return f"{found['median']:.{digits}f} ({found['low']:.{digits}f} to {found['high']:.{digits}f})"


def table_rows(ranks: Sequence[Sequence[dict[str, Any]]], steps: int) -> list[dict[str, Any]]:
    """For the common table: the training thread's CPU time in a step without both, and with that in their calls."""
    bare = [[1e6 * pair["off"][1] / steps for pair in figures] for figures in ranks]
    calls = [[pair["reduced"]["timing"] + pair["reduced"]["logging"] for pair in figures] for figures in ranks]
    return [
        rows.paired(
            f"step timing and run.log, rank {rank}",
            "us of CPU",
            [sum(both) for both in zip(bare[rank], calls[rank], strict=True)],
            bare[rank],
            "the same step without both",
            more=BAR_US,
        ).as_json()
        for rank in range(len(ranks))
    ]


def hook_row(pairs: Sequence[dict[str, float]]) -> dict[str, Any]:
    """For the common table."""
    on, off = ([pair[kind] for pair in pairs] for kind in ("on", "off"))
    what = "an optimizer's step that is seen"
    return rows.paired(what, "us of CPU", on, off, "the same step unseen", more=HOOK_BAR_US).as_json()


def described_hook(pairs: Sequence[dict[str, float]]) -> str:
    """The report's section about the hook."""
    extra = [pair["on"] - pair["off"] for pair in pairs]
    low, high = report.bootstrap_interval(extra)
    bare = report.median([pair["off"] for pair in pairs])
    return f"""

## The hook of a script that does not use clusterddp

In a run of one rank, an optimizer with a single number takes {bare:.0f} us of CPU per step, and with the hook
{report.median(extra):.0f} us more (95% interval {low:.0f} to {high:.0f}; {len(pairs)} pairs of blocks of {HOOK_STEPS}
steps). The bar, at most {HOOK_BAR_US:.0f} us more, is {report.verdict(report.median(extra) <= HOOK_BAR_US)}."""


def described(summary: dict[str, Any], pairs: int, steps: int) -> str:
    """The report."""
    columns = ("timing", "logging", "both", "most")
    calls = [
        [rank, words, *(f"{found[kind][name]:.0f}" for name in columns)]
        for rank, found in enumerate(summary["calls_us"])
        for kind, words in LOGGED.items()
    ]
    clock_us = summary["calls_us"][0]["plain"]["clock"]
    head = ["", "with and without", "without and without (A/A)"]
    rows = [
        [f"rank {rank}: CPU us per step", *(_interval(one, 0) for one in found)]
        for rank, found in enumerate(summary["difference_us"])
    ]
    rows.append(["rank 0: ratio of wall times", *(_interval(one, 4) for one in summary["wall_ratio"])])
    return f"""# What step timing and `run.log` cost

{report.place()}
`python -m benchmarks.steps.step_timing`: a run of {RANKS} gloo ranks under `submit --local`, steps of
{summary["step_ms"]:.1f} ms, blocks of {steps} steps, on a machine with a load average of {summary["load"]:.0f}.
In each step with logging, `run.log` is called twice, with four values, two of them tensors.

CPU time of the training thread in the calls themselves, in microseconds per step: medians of {pairs} blocks, and the
block with the most. The time for reading the clock around each call was measured, too ({clock_us:.0f} us per step), and
is left out. Without `reduce`, the training thread of rank 0 writes the line of `metrics.jsonl`; with it, another thread
does, once the other ranks' values are there.

{report.table(["rank", "`run.log`", "timing", "logging", "both", "both, most"], calls)}

The bar, at most {BAR_US:.0f} us for both, is {report.verdict(summary["met"])}. `tests/unit/test_step_cost.py` limits
the number of Python instructions in these calls.

The same by comparison: the difference of the training thread's CPU time, and the ratio of the wall time, between a
block with both and one without next to it, and between two blocks without. Medians of {pairs} pairs, with their 95%
intervals.

{report.table(head, rows)}"""


def main() -> None:
    """Measures and writes the report."""
    options = block_options(__doc__, 60, 50, (8, 25))
    ranks = measure(options.pairs, options.steps, options.step_ms)
    summary = {**summarized(ranks, options.steps), "load": os.getloadavg()[0]}
    hook = measure_hook(options.pairs)
    text = described(summary, options.pairs, options.steps) + described_hook(hook)
    common = [*table_rows(ranks, options.steps), hook_row(hook)]
    figures = {"steps": options.steps, "summary": summary, "ranks": ranks, "hook": hook, "rows": common}
    report.write(options.out, "step-timing", text, figures)


if __name__ == "__main__":
    main()
