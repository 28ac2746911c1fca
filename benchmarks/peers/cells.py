"""What a cell's step log tells: repeated steps, the first new step after each fault, effective training time.

Pure: a cell is made of the lines of the log and the moments that the injector noted.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True)
class Line:
    """A step that rank 0 made."""

    time: float
    step: int
    pid: int


def parse(text: str) -> list[Line]:
    """The whole lines of ``steps``."""
    found = []
    for line in text.rpartition("\n")[0].splitlines():
        time, step, pid = line.split()
        found.append(Line(float(time), int(step), int(pid)))
    return found


def new_steps(lines: Iterable[Line]) -> list[Line]:
    """Those that had not been made before."""
    found: list[Line] = []
    for line in lines:
        if not found or line.step > found[-1].step:
            found.append(line)
    return found


def repeated(lines: Sequence[Line]) -> int:
    return len(lines) - len(new_steps(lines))


def step_seconds(lines: Sequence[Line]) -> float:
    """The median step between two lines of one process."""
    times = [after.time - before.time for before, after in pairwise(lines) if after.pid == before.pid]
    return statistics.median(times) if times else float("nan")


def first_new(lines: Sequence[Line], asked: float) -> float | None:
    """Seconds from a fault to the first new step of a process that had made none before; None: never, or no restart."""
    before = {line.pid for line in lines if line.time <= asked}
    return next((line.time - asked for line in new_steps(lines) if line.time > asked and line.pid not in before), None)


def pace_seconds(lines: Sequence[Line]) -> float:
    """The mean of the same: saves that block, and a busy machine, are in it."""
    times = [after.time - before.time for before, after in pairwise(lines) if after.pid == before.pid]
    return statistics.fmean(times) if times else float("nan")


def gaps(lines: Sequence[Line]) -> list[float]:
    """Seconds without progress at each change of processes: from the last new step before to the first after."""
    new = new_steps(lines)
    return [after.time - before.time for before, after in pairwise(new) if after.pid != before.pid]


def figures(cell: dict[str, Any], lines: Sequence[Line]) -> dict[str, Any]:
    """What is added to a cell: ``submitted``, ``finished`` (or None) and ``faults`` are there."""
    faults = [
        {**fault, "first_new_s": _rounded(first_new(lines, fault["asked"])) if fault["made"] else None}
        for fault in cell["faults"]
    ]
    return {
        **cell,
        "faults": faults,
        "wall_s": _rounded(cell["finished"] - cell["submitted"] if cell["finished"] else None),
        "start_s": _rounded(lines[0].time - cell["submitted"] if lines else None),
        "last_new_s": _rounded(new_steps(lines)[-1].time - cell["submitted"] if lines else None),
        "reached": max((line.step + 1 for line in lines), default=0),
        "repeated": repeated(lines),
        "processes": len({line.pid for line in lines}),
        "gaps_s": [round(gap, 3) for gap in gaps(lines)],
        "step_s": _rounded(step_seconds(lines), 4) if lines else None,
        "pace_s": _rounded(pace_seconds(lines), 4) if lines else None,
    }


def ettr(steps: int, step_s: float, wall_s: float) -> float:
    """Productive time over the wall time."""
    return steps * step_s / wall_s


def bound(steps: int, step_s: float, start_s: float, each_s: float, faults: int, repeated_s: float = 0.0) -> float:
    """The same of a run that loses nothing but its start and, with each fault, what it takes to start again.

    ``each_s`` is measured with a script that restores nothing and repeats nothing; ``repeated_s`` is half a checkpoint
    interval where a fault comes without a notice. For many faults at a rate r it tends to Meta's
    ``1 - r (u0 + dt / 2)`` (arXiv 2410.21680) with saves that block nothing, to the first order.
    """
    productive = steps * step_s
    return productive / (productive + start_s + faults * (each_s + repeated_s))


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)
