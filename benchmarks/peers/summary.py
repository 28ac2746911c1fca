"""From measured cells to the figures of the page: per peer and schedule, and clusterddp beside the bound."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks.common import Row, paired, unpaired
from benchmarks.peers.cells import bound, ettr, figures, parse
from benchmarks.peers.peers import LIMIT, PEERS
from benchmarks.peers.schedules import CELL_S, EPOCHS, PER_EPOCH, SAVE_EPOCHS, SCHEDULES, Schedule

OURS = "clusterddp"
#: The effective training time of ours under a preemption every 60 s, over its bound.
ALLOWED = 0.97
#: Starts take longer on a busier machine: a cell is compared with the limit's cells that ran beside it for such a share
#: of its time; where there are none, with those that began within so many seconds.
BESIDE, NEAR_S = 0.5, 900.0
#: A run that has made a new step so many seconds before the end of its cell is slow, not lost.
ALIVE_S = 90.0
LIMIT_IS = "the bound"


def refreshed(cells: Iterable[dict[str, Any]], state: Path) -> list[dict[str, Any]]:
    """The cells with their figures derived from the step logs that were kept."""
    found = []
    for cell in cells:
        log = state / "cells" / f"{cell['peer']}-{cell['schedule']}-{cell['repetition']}" / "steps"
        found.append(figures(cell, parse(log.read_text())) if log.exists() else cell)
    return found


class Matrix:
    """The cells, and what they say of a peer under a schedule."""

    def __init__(self, cells: Sequence[dict[str, Any]], finals: Path, steps: int = EPOCHS * PER_EPOCH) -> None:
        self.cells, self._finals, self.steps = cells, finals, steps

    def of(self, peer: str, schedule: str, completed: bool = False) -> list[dict[str, Any]]:
        cells = [cell for cell in self.cells if (cell["peer"], cell["schedule"]) == (peer, schedule)]
        return [cell for cell in cells if cell["finished"]] if completed else cells

    def common(self, schedule: str) -> set[int]:
        """The repetitions that all peers have; all, if there are none: what is compared was measured together."""
        found = [{cell["repetition"] for cell in self.of(peer, schedule)} for peer in PEERS]
        return set.intersection(*found) or set.union(*found)

    def limits(self, near: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """The limit's cells; those that ran beside another cell, else those of the same quarter of an hour, if any."""
        cells = [cell for cell in self.cells if cell["peer"] == LIMIT.name and cell["finished"]]
        if near is None or not near["finished"]:
            return cells
        beside = [cell for cell in cells if _overlap(cell, near) >= BESIDE]
        return beside or [one for one in cells if abs(one["submitted"] - near["submitted"]) <= NEAR_S] or cells

    def start(self, near: dict[str, Any] | None = None) -> float:
        """The limit's seconds from the submission to the end of the first step: no fault comes before it."""
        return _median([cell["start_s"] for cell in self.limits(near)])

    def each(self, near: dict[str, Any] | None = None) -> float:
        """What the limit loses with a preemption: seconds without progress."""
        gaps = [gap for cell in self.limits(near) for gap in cell["gaps_s"]]
        return fmean(gaps) if gaps else math.nan if near is None else self.each()

    def bound_of(self, cell: dict[str, Any], step_s: float) -> float:
        """The bound of a cell's effective training time: as often interrupted as it was."""
        schedule = SCHEDULES[cell["schedule"]]
        start, each = self.start(cell), self.each(cell)
        if schedule.announced:
            return bound(self.steps, step_s, start, each, interruptions(cell, schedule))
        again = SAVE_EPOCHS * PER_EPOCH * step_s / 2
        return bound(self.steps, step_s, start, start, interruptions(cell, schedule), again)

    def differing(self, cell: dict[str, Any]) -> int | None:
        """How many final values differ from those of the peer's undisturbed run; None: not known."""
        reference = next((one["final"] for one in self.of(cell["peer"], "none", completed=True)), None)
        if not cell["final"] or not reference:
            return None
        if cell["final"] == reference:
            return 0
        files = [self._finals / f"{name}.bin" for name in (cell["final"], reference)]
        if not all(file.exists() for file in files):
            return None
        one, other = (np.fromfile(file, np.uint32) for file in files)
        return int((one != other).sum())

    def figures(self, peer: str, schedule: str) -> dict[str, Any]:
        """Medians over the repetitions of a cell of the matrix."""
        cells = [cell for cell in self.of(peer, schedule) if cell["repetition"] in self.common(schedule)]
        cells.sort(key=lambda cell: cell["repetition"])
        done = [cell for cell in cells if cell["finished"]]
        alone = [cell["wall_s"] for cell in self.of(peer, "none", completed=True)]
        handovers = [one for cell in cells for one in cell["handovers"]]
        return {
            "peer": peer,
            "schedule": schedule,
            "run": len(cells),
            "completed": len(done),
            "still_training": sum(1 for cell in cells if not cell["finished"] and still_training(cell)),
            "end": sorted({_end(cell) for cell in cells if not cell["finished"]}),
            "reached": [cell["reached"] for cell in cells if not cell["finished"]],
            "wall_s": _some([cell["wall_s"] for cell in done]),
            "undisturbed_s": _some(alone),
            "repeated": _some([cell["repeated"] for cell in done]),
            "handover_s": _some([h["from_signal_s"] for h in handovers]),
            "first_new_s": _some([fault["first_new_s"] for cell in cells for fault in cell["faults"]]),
            "gap_s": _some([gap for cell in cells for gap in cell["gaps_s"]]),
            "ettr": _some([ettr(self.steps, cell["pace_s"], cell["wall_s"]) for cell in done]),
            "ettr_of_each": [round(ettr(self.steps, cell["pace_s"], cell["wall_s"]), 4) for cell in done],
            "bound": _some([self.bound_of(cell, cell["pace_s"]) for cell in done]),
            "differing": [self.differing(cell) for cell in done],
        }

    def of_bound(self, cell: dict[str, Any]) -> float:
        """A cell's effective training time over its bound, both with the cell's own mean step.

        With the undisturbed run's, a machine that was busier in one cell than in another would count as a fault's cost.
        """
        return ettr(self.steps, cell["pace_s"], cell["wall_s"]) / self.bound_of(cell, cell["pace_s"])

    def rows(self) -> list[Row]:
        """The wall time of ours beside the bound's, for each schedule with a fault; what one preemption costs both."""
        found = []
        for schedule in list(SCHEDULES)[1:]:
            done = self.of(OURS, schedule, completed=True)
            if not done or math.isnan(self.each()) or math.isnan(self.start()):
                continue
            limits = [cell["wall_s"] * self.of_bound(cell) for cell in done]
            words = f"wall time, {SCHEDULES[schedule].words}"
            allowed = 1 / ALLOWED if schedule == "preempt-60" else None
            found.append(paired(words, "s", [cell["wall_s"] for cell in done], limits, LIMIT_IS, allowed=allowed))
        ours, limit = (
            [gap for name in ("preempt", "preempt-60") for cell in self.of(peer, name) for gap in cell["gaps_s"]]
            for peer in (OURS, LIMIT.name)
        )
        if ours and limit:
            words = "no progress around a preemption, GraceTime=0"
            found.append(unpaired(words, "s", ours, limit, "the same for a script that restores and repeats nothing"))
        return found


def leads(by_key: Mapping[tuple[str, str], dict[str, Any]]) -> list[tuple[str, float, str, float, list[float]]]:
    """Under each schedule: ours, the best peer that completed all its cells, and the ratios of equal repetitions."""
    found = []
    for schedule in SCHEDULES:
        ours = by_key[OURS, schedule]
        peers = [by_key[peer, schedule] for peer in PEERS if peer != OURS]
        whole = [one for one in peers if one["completed"] == one["run"] > 0]
        if whole and ours["completed"] == ours["run"] > 0:
            best = max(whole, key=lambda one: float(one["ettr"]))
            pairs = zip(ours["ettr_of_each"], best["ettr_of_each"], strict=True)
            found.append(
                (schedule, ours["ettr"], best["peer"], best["ettr"], sorted(one / other for one, other in pairs))
            )
    return found


def interruptions(cell: dict[str, Any], schedule: Schedule) -> int:
    """How often it was: what was injected, or the time limits that came."""
    return sum(1 for fault in cell["faults"] if fault["made"]) if schedule.kind else len(cell["gaps_s"])


def everything(matrix: Matrix) -> list[dict[str, Any]]:
    return [matrix.figures(peer, schedule) for schedule in SCHEDULES for peer in [*PEERS, LIMIT.name]]


def _overlap(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The share of the other's time in which both ran."""
    both = min(one["finished"], other["finished"]) - max(one["submitted"], other["submitted"])
    return float(max(0.0, both) / (other["finished"] - other["submitted"]))


def still_training(cell: dict[str, Any]) -> bool:
    """Whether it made new steps until its time was over: slow, not lost."""
    last = cell["last_new_s"]
    return cell["end"] not in ("completed", "no job left") and last is not None and last > CELL_S - ALIVE_S


def _end(cell: dict[str, Any]) -> str:
    """What became of a cell that is not done."""
    if cell["end"] == "no job left":
        return f"job {cell['slurm'].split()[0]}"
    return f"{cell['end']}{'' if still_training(cell) else ', without progress'}"


def _median(values: Sequence[float]) -> float:
    return median(values) if values else math.nan


def _some(values: Iterable[float | None]) -> float | None:
    """The median of those that there are."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    return round(median(known), 4) if known else None
