"""What step timing and ``run.log`` cost: ``python -m benchmarks.steps.step_timing``, 3 minutes.

``make bench-step-timing``. A run of two gloo ranks on this machine under ``submit --local``, in steps of about 10 ms,
in blocks of 50 steps: with timing and logging (two calls of ``run.log``, four values), in which the CPU time of the
training thread in each of their calls is added up, and without both.

The bar: at most 100 us of the training thread's CPU per step, for both together, on each rank.

For a script that does not use clusterddp, the hook that sees its optimizer's steps is measured, too, in a run of one
rank whose step is that of an optimizer with a single number, with the hook and without. The bar: at most 25 us more.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report, rows
from benchmarks.steps.agreement import block_options

RANKS = 2
BAR_US, HOOK_BAR_US = 100.0, 25.0
#: Whether two of the values are reduced.
LOGGED = {"reduced": "", "plain": ", without `reduce`"}
SCRIPT, HOOK_SCRIPT = (Path(__file__).parents[1] / "scripts" / name for name in ("step_timing.py", "optimizer_hook.py"))
#: Steps of a block with the hook.
HOOK_STEPS = 500
REPOSITORY = Path(__file__).resolve().parents[2]


def train(script: Path, folder: str, ranks: int, how: Sequence[str]) -> None:
    """A local run."""
    run = [sys.executable, "-m", "clusterddp", "submit", str(script), "--local", "--run-dir", f"{folder}/run"]
    shape = ["--device", "cpu", "--gpus", str(ranks), "--set", "progress_interval=off"]
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


def rows_of(ranks: Sequence[Sequence[dict[str, Any]]]) -> list[rows.Row]:
    """The training thread's CPU time in a step without both, and with that in their calls."""
    found = []
    for (kind, words), (rank, figures) in itertools.product(LOGGED.items(), enumerate(ranks)):
        bare = [pair["off"] for pair in figures]
        both = [pair["off"] + pair[kind]["timing"] + pair[kind]["logging"] for pair in figures]
        name = f"step timing and run.log, rank {rank}{words}"
        found.append(rows.paired(name, "us of CPU", both, bare, "the same step without both", more=BAR_US))
    return found


def hook_row(pairs: Sequence[dict[str, float]]) -> rows.Row:
    on, off = ([pair[kind] for pair in pairs] for kind in ("on", "off"))
    return rows.paired(
        "an optimizer's step that is seen", "us of CPU", on, off, "the same step unseen", more=HOOK_BAR_US
    )


def main() -> None:
    """Measures and writes the report."""
    options = block_options(__doc__, 60, 50, (8, 25))
    ranks = measure(options.pairs, options.steps, options.step_ms)
    hook = measure_hook(options.pairs)
    text = f"""# What step timing and `run.log` cost

{RANKS} gloo ranks under `submit --local`, blocks of {options.steps} steps, in each of which `run.log` is called twice,
with four values, two of them tensors."""
    lines = [
        [
            rank,
            kind,
            *(report.median([pair[kind][what] for pair in figures]) for what in ("timing", "logging", "clock")),
        ]
        for rank, figures in enumerate(ranks)
        for kind in LOGGED
    ]
    extra = [pair["on"] - pair["off"] for pair in hook]
    low, high = report.bootstrap_interval(extra)
    tables = {
        "CPU us per step in the calls": report.table(["rank", "`run.log`", "timing", "logging", "clock"], lines),
        "The hook of a script that does not use clusterddp": report.table(
            ["CPU us of a step more, median", "95% interval"], [[report.median(extra), f"{low:.1f} to {high:.1f}"]]
        ),
    }
    found = [row.as_json() for row in [*rows_of(ranks), hook_row(hook)]]
    figures = {"steps": options.steps, "ranks": ranks, "hook": hook, "rows": found}
    report.write(options.out, "step-timing", text, figures, tables=tables)


if __name__ == "__main__":
    main()
