"""The page of ``benchmarks.saves``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import report, rows
from benchmarks.savers import CALLS_AND_COPY, EMPTY_LOOP, OURS

#: Series of the figures, besides those of savers.
NO_SAVE, CPU = "no save", "writer's CPU"


def described(
    cases: Mapping[str, Any],
    found: Sequence[rows.Row],
    load: float,
    threads: int,
    left_out: Sequence[str] = (),
    note: str = "",
) -> str:
    """The page."""
    states = [[name, one["bytes"] / 1e6, one["tensors"], len(one["stall"][OURS])] for name, one in cases.items()]
    text = f"""# What a save costs training

{report.place()} {time.strftime("%Y-%m-%d")}, at a load average of {load:.1f} before. One process, CPU tensors,
{threads} threads of torch, files on one local disk: no GPU and no shared file system is in these figures. Only ratios
tell something about another machine. See `benchmarks/saves.py` for what is measured. {ABOUT} {note}

{rows.table([row.as_json() for row in found])}

Not measured, for too little memory: {", ".join(left_out) or "none"}.

{report.table(["state", "MB", "tensors", "pairs of saves"], states)}

{LOST}

{lost_table(cases)}
"""
    for name, figures in cases.items():
        if figures["peers"]:
            text += f"\n## Other savers: {name}\n\n{peers_table(figures['peers'])}\n"
    return text


LOST = """## Training time lost while a save is written

Training that uses all cores synchronizes its threads at each operation, so taking a core from one thread delays all of
them. The empty loop shows what any process with the writer's priority and CPU time costs. If the training thread sleeps
for half of each step, the cores stay busy nevertheless, because the other threads of GNU OpenMP spin."""

ABOUT = """On a loaded machine, the
CPU time of the training thread tells more than the time from start to end of a stall: it leaves out what others took.
The time lost is the difference to the same steps without a save."""


def lost_table(cases: Mapping[str, Any]) -> str:
    """Medians in milliseconds."""
    series = [OURS, EMPTY_LOOP, NO_SAVE, CPU]
    lines = [
        [name, training, *(f"{report.median(milliseconds(seconds[what])):.1f}" for what in series)]
        for name, figures in cases.items()
        for training, seconds in figures["lost"].items()
    ]
    return report.table(["state", "training", *(f"{what}, ms" for what in series)], lines)


def peers_table(everyone: Mapping[str, Mapping[str, Any]]) -> str:
    """Milliseconds: medians, the worst in parentheses."""
    figures = {name: one for name, one in everyone.items() if "failed" not in one}
    least = report.median(figures[CALLS_AND_COPY]["stall"])
    lines = [
        [
            name,
            *(
                f"{report.median(milliseconds(one[what])):.1f} ({report.worst(milliseconds(one[what])):.1f})"
                for what in ("stall", "lost")
            ),
        ]
        for name, one in figures.items()
    ]
    ratios = [report.median(one["stall"]) / least for one in figures.values()]
    table: list[list[object]] = [[*line, ratio] for line, ratio in zip(lines, ratios, strict=True)]
    table += [[name, one["failed"], "-", "-"] for name, one in everyone.items() if "failed" in one]
    return report.table(["saver", "stall, ms", "training time lost with the stall, ms", "stall by the limit"], table)


def milliseconds(seconds: Sequence[float]) -> list[float]:
    return [1000 * value for value in seconds]
