"""What a run costs while it trains: ``python -m benchmarks.steady_state``, 10 minutes (``make bench-steady-state``).

Two gloo ranks of a run under ``submit --local`` with everything on: two calls of ``run.log`` per step with one reduced
value, step timing, the watchdog, a checkpoint and an evaluation every 100 steps, ``best=``, ``script_state=``. Beside
them, two ranks of a loop as in torch's DDP tutorial, in processes without clusterddp. They make blocks of the same
steps in turn, while the others wait; two blocks of the bare loop in each round show the machine's noise (A/A).

A step is a small model's forward, backward and optimizer's step, and then waits 10 or 100 ms, as a step on a GPU does:
what clusterddp does comes on top. Counted per step: the training thread's CPU time, that of all threads of the rank,
wall time, the Python instructions of the training thread, and the training thread's CPU
time in each part of a step. `tests/unit/test_step_cost.py` limits the instructions, and what memory grows by.

The bar: at most 150 us of the training thread's CPU per step more than the bare loop, on each rank.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from benchmarks import report, rows
from tests.ddp import free_port

RANKS, BAR_US = 2, 150.0
SCRIPT = Path(__file__).with_name("scripts") / "steady_state.py"
REPOSITORY = SCRIPT.parents[2]
#: A save in each block of the shorter steps, and in some of the longer ones.
EVALUATED_EVERY = 100
SAVED_EVERY = f"{EVALUATED_EVERY} steps"
#: Milliseconds of a step, and the steps of a block.
BLOCKS = {10: 100, 100: 10}
ORDER = ("ours", "bare", "again")
COUNTED_STEPS = 100
#: The parts of a step, as in the script.
PARTS = ("between two steps", "forward", "backward", "optimizer's step", "sleep", "run.log")
#: What the ranks measured in a block, by rank.
Measured = list[dict[str, float]]


class Loops:
    """The ranks of both loops, each of which waits for its next block."""

    def __init__(self, connections: dict[tuple[str, int], Connection]) -> None:
        self._connections = connections

    def block(self, who: str, steps: int, pause_ms: float, *, count: bool = False, parts: bool = False) -> Measured:
        """Lets the ranks of a loop make a block. Each figure is of the whole block.

        ``count``: with the Python instructions. ``parts``: with the CPU time of a step's parts.
        """
        ranks = [self._connections[who, rank] for rank in range(RANKS)]
        command = {"steps": steps, "pause": pause_ms / 1000, "count": count, "parts": parts}
        for connection in ranks:
            connection.send(command)
        return [connection.recv() for connection in ranks]

    def end(self) -> None:
        for connection in self._connections.values():
            connection.send(None)


@contextmanager
def both_loops() -> Iterator[Loops]:
    """Starts the processes; ends them with the block."""
    with tempfile.TemporaryDirectory() as folder, Listener(f"{folder}/socket", backlog=2 * RANKS) as listener:
        processes = [
            our_run(folder),
            *(bare_rank(folder, rank, port) for port in [free_port()] for rank in range(RANKS)),
        ]
        try:
            connections = {}
            for _ in range(2 * RANKS):
                connection = listener.accept()
                connections[connection.recv()] = connection
            loops = Loops(connections)
            yield loops
            loops.end()
            if any(codes := [process.wait(60) for process in processes]):
                sys.exit(f"the processes ended with {codes}")
        finally:
            for process in processes:
                process.terminate()
                process.wait()


def our_run(folder: str) -> subprocess.Popen[bytes]:
    run = [sys.executable, "-m", "clusterddp", "submit", str(SCRIPT), "--local", "--run-dir", f"{folder}/run"]
    shape = ["--device", "cpu", "--gpus", str(RANKS), "--set", "progress_interval=off"]
    saves = ["--set", f"checkpoint.every={SAVED_EVERY}"]
    return subprocess.Popen([*run, *shape, *saves, "--", f"{folder}/socket", "ours"], cwd=REPOSITORY)


def bare_rank(folder: str, rank: int, port: int) -> subprocess.Popen[bytes]:
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **common, "WORLD_SIZE": str(RANKS), "RANK": str(rank)}
    return subprocess.Popen([sys.executable, str(SCRIPT), f"{folder}/socket", "bare"], cwd=REPOSITORY, env=environment)


# ---- the figures


def measure(rounds: int, lengths: Sequence[int]) -> dict[str, Any]:
    """Rounds of blocks of these lengths, then what is counted rather than timed."""
    blocks: dict[str, list[dict[str, Measured]]] = {str(pause): [] for pause in lengths}
    with both_loops() as loops:
        for who in ("bare", "ours"):  # allocates, connects, and prepares for saves
            loops.block(who, 2 * EVALUATED_EVERY, 1)
        for number in range(rounds):
            for pause in lengths:
                blocks[str(pause)].append(one_round(loops, number, BLOCKS[pause], pause))
        profile = profiled(loops, rounds // 3 or 1, lengths)
        counted = {who: loops.block(who, COUNTED_STEPS, 0.1, count=True) for who in ("bare", "ours")}
    return {"blocks": blocks, "profile": profile, "counted": counted}


def profiled(loops: Loops, rounds: int, lengths: Sequence[int]) -> dict[str, list[dict[str, Measured]]]:
    """Where a step's time goes: its parts in both loops."""
    return {
        str(pause): [
            {who: loops.block(who, BLOCKS[pause], pause, parts=True) for who in ("bare", "ours")} for _ in range(rounds)
        ]
        for pause in lengths
    }


def one_round(loops: Loops, number: int, steps: int, pause_ms: float) -> dict[str, Measured]:
    """A block of ours and two of the bare loop. The order changes: a drift of the machine's speed is on no side."""
    first = number % len(ORDER)
    measured = {}
    for name in (*ORDER[first:], *ORDER[:first]):
        found = loops.block("ours" if name == "ours" else "bare", steps, pause_ms)
        measured[name] = [{what: value / steps for what, value in of_rank.items()} for of_rank in found]
    return measured


def series(figures: dict[str, Any], pause: int, name: str, what: str, rank: int, unit: float) -> list[float]:
    """A figure per step, in each round."""
    return [unit * one[name][rank][what] for one in figures["blocks"][str(pause)]]


def table_rows(figures: dict[str, Any]) -> list[rows.Row]:
    """For the common table."""
    found, limit = [], "the bare DDP loop"
    for pause in map(int, figures["blocks"]):

        def row(words: str, ours: list[float], bare: list[float], unit: str, more: float | None = None) -> None:
            found.append(rows.paired(f"step of {pause} ms: {words}", unit, ours, bare, limit, more=more))  # noqa: B023

        for rank in range(RANKS):
            ours, bare = (series(figures, pause, name, "thread", rank, 1e6) for name in ("ours", "bare"))
            row(f"CPU of rank {rank}'s training thread", ours, bare, "us", BAR_US)
        ours, bare = (series(figures, pause, name, "process", 0, 1e6) for name in ("ours", "bare"))
        row("CPU of all threads of rank 0", ours, bare, "us")
        ours, bare, again = (series(figures, pause, name, "wall", 0, 1e3) for name in ORDER)
        row("wall time", ours, bare, "ms")
        row("the bare loop with itself (A/A), wall time", again, bare, "ms")
    mine, others = (figures["counted"][who][0]["instructions"] / COUNTED_STEPS for who in ("ours", "bare"))
    return [*found, rows.counted("Python instructions of a step", "", mine, others, limit)]


def by_part(figures: dict[str, Any], pause: int) -> list[list[str]]:
    """For each part of a step, its CPU time in both loops on rank 0, and the difference on each rank."""
    found, steps = figures["profile"][str(pause)], BLOCKS[pause]

    def us(who: str, part: str, rank: int) -> list[float]:
        return [1e6 * one[who][rank][part] / steps for one in found]

    lines = []
    for part in PARTS:
        ours, bare = (f"{report.median(us(who, part, 0)):.0f}" for who in ("ours", "bare"))
        lines.append([part, ours, bare, *(paired_us(us("ours", part, r), us("bare", part, r)) for r in range(RANKS))])
    return lines


def paired_us(ours: Sequence[float], other: Sequence[float]) -> str:
    """The median of the differences, and its interval."""
    differences = [one - another for one, another in zip(ours, other, strict=True)]
    low, high = report.bootstrap_interval(differences)
    return f"{report.median(differences):.0f} ({low:.0f} to {high:.0f})"


def main() -> None:
    """Measures and writes the report."""
    parser = report.parser(__doc__, "6 rounds")
    parser.add_argument("--rounds", type=int, help="(default: 40)")
    parser.add_argument(
        "--lengths", type=int, nargs="+", choices=list(BLOCKS), default=list(BLOCKS), help="of a step, ms"
    )
    options = parser.parse_args()
    rounds = options.rounds or (6 if options.quick else 40)
    figures = measure(rounds, options.lengths)
    blocks = " and ".join(f"{BLOCKS[pause]} steps of {pause} ms" for pause in options.lengths)
    text = f"""# What a run costs while it trains

{RANKS} gloo ranks; medians of {rounds} rounds, {blocks} in each block. A step waits so long with its CPU idle, as a
step on a GPU does; on CPUs that train, only the CPU figures apply."""
    head = ["part", "ours", "the bare loop", *(f"more on rank {rank}" for rank in range(RANKS))]
    tables = {f"CPU us by part, step of {p} ms": report.table(head, by_part(figures, p)) for p in options.lengths}
    found = [row.as_json() for row in table_rows(figures)]
    report.write(options.out, "steady-state", text, {**figures, "rows": found}, tables=tables)


if __name__ == "__main__":
    main()
