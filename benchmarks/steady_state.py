"""What a run costs while it trains: ``python -m benchmarks.steady_state``, 10 minutes.

Two gloo ranks of a run under ``submit --local`` with everything on: two calls of ``run.log`` per step with one reduced
value, step timing, the watchdog, a checkpoint and an evaluation every 100 steps, ``best=``, ``script_state=``. Beside
them, two ranks of a loop as in torch's DDP tutorial, in processes without clusterddp. They make blocks of the same
steps in turn, while the others wait; two blocks of the bare loop in each round show the machine's noise (A/A).

A step is a small model's forward, backward and optimizer's step, and then waits 10 or 100 ms, as a step on a GPU does:
what clusterddp does comes on top. Counted per step: the training thread's CPU time, that of all threads of the rank,
wall time, and the Python instructions of the training thread. `tests/unit/test_step_cost.py` limits the instructions.

The bar: at most 150 us of the training thread's CPU per step more than the bare loop, on each rank.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.sides import REPOSITORY, SCRIPTS, in_turns, local_run, torchrun_variables
from tests.ddp import free_port

RANKS, BAR_US = 2, 150.0
SCRIPT = SCRIPTS / "steady_state.py"
#: A save in each block of the shorter steps, and in some of the longer ones.
EVALUATED_EVERY = 100
#: Milliseconds of a step, and the steps of a block.
BLOCKS = {10: 100, 100: 10}
COUNTED_STEPS = 100
TEXT = f"""# What a run costs while it trains

{RANKS} gloo ranks make steps of 10 and 100 ms, in which the CPU sleeps as it does while a GPU works. A bare DDP loop
takes turns with them."""
#: What the ranks measured in a block, by rank.
Measured = list[dict[str, float]]


class Loops:
    """The ranks of both loops, each of which waits for its next block."""

    def __init__(self, connections: dict[tuple[str, int], Connection], ranks: int) -> None:
        self._connections, self._ranks = connections, ranks

    def block(self, who: str, steps: int, pause_ms: float, count: bool = False) -> Measured:
        """Lets the ranks of a loop make a block. The figures are per step; ``count``: with the Python instructions."""
        ranks = [self._connections[who, rank] for rank in range(self._ranks)]
        for connection in ranks:
            connection.send({"steps": steps, "pause": pause_ms / 1000, "count": count})
        return [{what: value / steps for what, value in connection.recv().items()} for connection in ranks]

    def end(self) -> None:
        for connection in self._connections.values():
            connection.send(None)


@contextmanager
def both_loops(ranks: int = RANKS, layers: int = 4) -> Iterator[Loops]:
    """Starts the processes; ends them with the block. ``layers``: of the model, each with two parameters."""
    with tempfile.TemporaryDirectory() as name, Listener(f"{name}/socket", backlog=2 * ranks) as listener:
        folder, port = Path(name), free_port()
        bare = (bare_rank(folder, rank, ranks, layers, port) for rank in range(ranks))
        processes = [our_run(folder, ranks, layers), *bare]
        try:
            connections = {}
            for _ in range(2 * ranks):
                connection = listener.accept()
                connections[connection.recv()] = connection
            loops = Loops(connections, ranks)
            yield loops
            loops.end()
            if any(codes := [process.wait(60) for process in processes]):
                sys.exit(f"the processes ended with {codes}")
        finally:
            for process in processes:
                process.terminate()
                process.wait()


def our_run(folder: Path, ranks: int, layers: int) -> subprocess.Popen[bytes]:
    saves = ["--set", f"checkpoint.every={EVALUATED_EVERY} steps"]
    run = local_run(SCRIPT, folder, ranks, folder / "socket", "ours", layers, options=saves)
    return subprocess.Popen(run, cwd=REPOSITORY)


def bare_rank(folder: Path, rank: int, ranks: int, layers: int, port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(SCRIPT), str(folder / "socket"), "bare", str(layers)]
    return subprocess.Popen(command, cwd=REPOSITORY, env=torchrun_variables(rank, ranks, port, 1))


# ---- the figures


def measure(quick: bool, rounds: int | None, lengths: Sequence[int]) -> common.Found:
    """Rounds of blocks, two of them of the bare loop (A/A); then the instructions."""
    with both_loops() as loops:
        for who in ("bare", "ours"):  # allocates, connects, and prepares for saves
            loops.block(who, 2 * EVALUATED_EVERY, 1)
        sides = {
            (pause, name): partial(loops.block, "ours" if name == "ours" else "bare", BLOCKS[pause], pause)
            for pause in lengths
            for name in ("ours", "bare", "again")
        }
        found = in_turns(sides, rounds or (6 if quick else 40), warm_up=0)
        counted = {who: loops.block(who, COUNTED_STEPS, 0.1, count=True) for who in ("bare", "ours")}
    blocks = {pause: {name: found[pause, name] for name in ("ours", "bare", "again")} for pause in lengths}
    figures = {"blocks": blocks, "counted": counted}
    return common.Found(figures, table_rows(figures))


def table_rows(figures: dict[str, Any]) -> list[common.Row]:
    """For the common table."""
    found, limit = [], "the bare DDP loop"
    for pause, blocks in figures["blocks"].items():

        def row(words: str, ours: str, what: str, rank: int, unit: str, more: float | None = None) -> None:
            scale = 1e6 if unit == "us" else 1e3
            mine, bare = ([scale * ranks[rank][what] for ranks in blocks[name]] for name in (ours, "bare"))  # noqa: B023
            found.append(common.paired(f"step of {pause} ms: {words}", unit, mine, bare, limit, more=more))  # noqa: B023

        for rank in range(RANKS):
            row(f"CPU of rank {rank}'s training thread", "ours", "thread", rank, "us", BAR_US)
        row("CPU of all threads of rank 0", "ours", "process", 0, "us")
        row("wall time", "ours", "wall", 0, "ms")
        row("the bare loop with itself (A/A), wall time", "again", "wall", 0, "ms")
    mine, others = (figures["counted"][who][0]["instructions"] for who in ("ours", "bare"))
    return [*found, common.counted("Python instructions of a step", "", mine, others, limit)]


if __name__ == "__main__":
    common.main(
        *("steady-state", __doc__, TEXT, measure, "6 rounds"),
        rounds={"type": int, "help": "(default: 40)"},
        lengths={"type": int, "nargs": "+", "choices": list(BLOCKS), "default": list(BLOCKS), "help": "of a step, ms"},
    )
