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
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report, rows
from benchmarks.sides import REPOSITORY, SCRIPTS, local_run

RANKS = 2
BAR_US, HOOK_BAR_US = 100.0, 25.0
#: Pairs of blocks and the steps of a block; also of ``--quick``.
FULL, QUICK = (60, 50), (8, 25)
#: Whether two of the values are reduced.
LOGGED = {"reduced": "", "plain": ", without `reduce`"}
#: Steps of a block with the hook.
HOOK_STEPS = 500
TEXT = f"""# Step timing and `run.log`

{RANKS} gloo ranks make steps of about 10 ms. Each calls `run.log` twice, with four values, two of them tensors."""


def in_a_run(script: str, ranks: int, *how: object) -> list[Any]:
    """What each rank of a local run writes to FOLDER/rank-R.json."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(local_run(SCRIPTS / script, folder, ranks, folder, *how), cwd=REPOSITORY, check=True)
        return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def rows_of(ranks: Sequence[Sequence[dict[str, Any]]]) -> list[rows.Row]:
    """The training thread's CPU time in a step without both, and with that in their calls."""
    found = []
    for (kind, words), (rank, figures) in itertools.product(LOGGED.items(), enumerate(ranks)):
        bare = [pair["off"] for pair in figures]
        both = [pair["off"] + pair[kind]["timing"] + pair[kind]["logging"] for pair in figures]
        name = f"step timing and run.log, rank {rank}{words}"
        found.append(rows.paired(name, "us of CPU", both, bare, "the same step without both", more=BAR_US))
    return found


def measure(quick: bool) -> report.Found:
    pairs, steps = QUICK if quick else FULL
    ranks = in_a_run("step_timing.py", RANKS, pairs, steps)
    (hook,) = in_a_run("optimizer_hook.py", 1, pairs, HOOK_STEPS)
    on, off = ([pair[kind] for pair in hook] for kind in ("on", "off"))
    name = "an optimizer's step that is seen"
    row = rows.paired(name, "us of CPU", on, off, "the same step unseen", more=HOOK_BAR_US)
    return report.Found({"steps": steps, "ranks": ranks, "hook": hook}, [*rows_of(ranks), row])


if __name__ == "__main__":
    report.main("step-timing", __doc__, TEXT, measure, "{} pairs of {} steps".format(*QUICK))
