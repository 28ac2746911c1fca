"""From the start of the ranks to their first step: ``python -m benchmarks.startup [--quick]``.

A script of one DDP step (benchmarks/scripts/startup.py), once with clusterddp under ``submit --local``, once as the
least DDP script, whose processes are started all at once with torchrun's variables. Both alternate, with 1 to 32 gloo
ranks on this machine.

- Time: from the start of the first rank's process until all ranks have made their first step, and its phases on rank 0.
- CPU time of a rank until then: on a machine with other work, that is what can be compared.
- What a rank imports: its modules at the first step.

Bar: ours takes at most 1.1 times as long.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.sides import REPOSITORY, SCRIPTS, in_turns, local_run, torchrun_variables
from tests.ddp import free_port

BAR = 1.1
RANKS, QUICK_RANKS = [1, 2, 4, 8, 16, 32], [1, 2, 4, 8]
ROUNDS, QUICK_ROUNDS = 12, 6
#: Seconds in which further rounds are begun, of all numbers of ranks together.
BUDGET_S, QUICK_BUDGET_S = 480.0, 80.0
RUN_S = 300.0
SCRIPT = SCRIPTS / "startup.py"
EMPTY, OURS = "empty", "ours"

TEXT = """# From the start of the ranks to the first step

A script of one DDP step under `submit --local`, in turns with the least DDP script, whose processes are started with
torchrun's variables. All ranks run on this machine."""


# ---- the two sides


def started(kind: str, ranks: int, folder: Path) -> list[subprocess.Popen[bytes]]:
    """What starts all ranks of ours, or each rank of the empty script: as many threads for both."""
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    if kind == OURS:
        command = local_run(SCRIPT, folder, ranks, OURS, folder)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        return [subprocess.Popen(command, cwd=REPOSITORY, env=environment, **pipes)]
    command, port = [sys.executable, str(SCRIPT), EMPTY, str(folder)], free_port()
    return [
        subprocess.Popen(command, env=torchrun_variables(rank, ranks, port, threads), **pipes) for rank in range(ranks)
    ]


def start(kind: str, ranks: int) -> list[dict[str, Any]]:
    """What all ranks have written, in rank order."""
    with tempfile.TemporaryDirectory() as name:
        processes = started(kind, ranks, Path(name))
        try:
            for process in processes:
                _, said = process.communicate(timeout=RUN_S)
                if process.returncode:
                    sys.exit(f"{kind}, {ranks} ranks: ended with {process.returncode}: {said.decode()[-800:]}")
        finally:
            for process in processes:
                process.kill()
        return [json.loads(Path(name, f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def seconds_of(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of one start."""
    began = min(rank["started"] for rank in found)
    ends = [rank["phases"]["first step"] for rank in found]
    first = found[0]
    times = [first["started"], *first["phases"].values()]
    phases = {name: times[place + 1] - times[place] for place, name in enumerate(first["phases"])}
    cpu = sum(rank["cpu_s"] for rank in found) / len(found)
    return {"seconds": max(ends) - began, "cpu": cpu, "phases": phases}


def all_starts(counts: Sequence[int], rounds: int, budget_s: float) -> dict[str, Any]:
    """The figures of all starts, by number of ranks and side, and what rank 0 has imported."""
    modules: dict[str, list[str]] = {}

    def side(kind: str, ranks: int) -> dict[str, Any]:
        made = start(kind, ranks)
        modules[kind] = made[0]["modules"]
        return seconds_of(made)

    calls = {(ranks, kind): partial(side, kind, ranks) for ranks in counts for kind in (OURS, EMPTY)}
    found = in_turns(calls, rounds, warm_up=0, seconds=budget_s)
    return {
        "ranks": {ranks: {kind: found[ranks, kind] for kind in (OURS, EMPTY)} for ranks in counts},
        "modules": modules,
    }


# ---- the report


def rows_of(figures: Mapping[str, Any]) -> list[common.Row]:
    """What is judged, and what is counted."""
    found = []
    for ranks, sides in figures["ranks"].items():
        for what, unit, words in (("seconds", "s", "exec to first step"), ("cpu", "s", "CPU time of a rank")):
            ours, empty = ([one[what] for one in sides[kind]] for kind in (OURS, EMPTY))
            name = f"start, {ranks} rank{'s' * (ranks > 1)}: {words}"
            found.append(common.paired(name, unit, ours, empty, "empty DDP script", allowed=BAR))
    mine, least = (len(figures["modules"][kind]) for kind in (OURS, EMPTY))
    name = "start, 1 rank: modules imported at the first step"
    return [*found, common.counted(name, "modules", mine, least, "empty DDP script")]


def measure(quick: bool, ranks: list[int] | None) -> common.Found:
    counts = ranks or (QUICK_RANKS if quick else RANKS)
    settings = (QUICK_ROUNDS, QUICK_BUDGET_S) if quick else (ROUNDS, BUDGET_S)
    figures = all_starts(counts, *settings)
    return common.Found(figures, rows_of(figures))


if __name__ == "__main__":
    numbers = {"type": int, "nargs": "+", "help": f"default: {RANKS}"}
    common.main("startup", __doc__, TEXT, measure, "1, 2, 4 and 8 ranks, in at most 2 minutes", ranks=numbers)
