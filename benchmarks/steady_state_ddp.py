"""A step of a model with many parameters beside plain DDP: ``python -m benchmarks.steady_state_ddp``, 3 minutes.

Four gloo ranks of a run with everything on, and four of a bare DDP loop, as in ``benchmarks/steady_state.py``. The
model has 300 parameters, in two of DDP's buckets.
"""

from __future__ import annotations

from functools import partial

from benchmarks import common
from benchmarks.sides import in_turns
from benchmarks.steady_state import both_loops

RANKS, LAYERS, STEPS, PAUSE_MS = 4, 150, 10, 1.0
TEXT = f"""# A step of a model with many parameters

{RANKS} gloo ranks train a model of {2 * LAYERS} parameters. A bare DDP loop takes turns with them."""


def measure(quick: bool, rounds: int | None) -> common.Found:
    """Rounds of blocks, two of them of the bare loop (A/A)."""
    with both_loops(RANKS, LAYERS) as loops:
        sides = {
            name: partial(loops.block, "ours" if name == "ours" else "bare", STEPS, PAUSE_MS)
            for name in ("ours", "bare", "again")
        }
        blocks = in_turns(sides, rounds or (6 if quick else 20), warm_up=2)
    found, where = [], f"step of {2 * LAYERS} parameters, {RANKS} ranks"
    for words, ours, what, unit, scale in (
        ("wall time", "ours", "wall", "ms", 1e3),
        ("CPU of all threads of rank 0", "ours", "process", "ms", 1e3),
        ("plain DDP with itself (A/A), wall time", "again", "wall", "ms", 1e3),
    ):
        mine, bare = ([scale * ranks[0][what] for ranks in blocks[name]] for name in (ours, "bare"))
        found.append(common.paired(f"{where}: {words}", unit, mine, bare, "plain DDP"))
    return common.Found({"blocks": blocks}, found)


if __name__ == "__main__":
    common.main(
        *("steady-state-ddp", __doc__, TEXT, measure, "6 rounds"),
        rounds={"type": int, "help": "(default: 20)"},
    )
