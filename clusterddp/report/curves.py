"""A run's metrics as curves of bounded size over steps, with repeated steps kept apart.

A curve is a list of points ``[x, mean, low, high]``: one for each of at most BUCKETS equal parts of its range that has
values. The file is read once, line by line.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from clusterddp.errors import RunDirectoryError
from clusterddp.history.beginnings import Beginning
from clusterddp.history.view import RunView
from clusterddp.jobdef.job import is_loss
from clusterddp.reporter import counted
from clusterddp.rundir import json_lines, metrics_lines, schemas
from clusterddp.rundir.run_directory import RunDirectory

Point = list[float]
Column = npt.NDArray[Any]
#: The maximum number of points of a curve, and of metrics to read.
BUCKETS, MOST_METRICS = 300, 100
#: Larger values are clipped, to keep differences between values finite.
_LARGEST = 1e300
#: The types of a value that is drawn, and how many lines are sorted into columns at once.
_NUMBERS, _TOGETHER = frozenset((int, float, bool)), 250


@dataclass
class Lines:
    """The lines of one attempt as columns. NaN: a value that a line does not have."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: dict[str, array[float]] = field(default_factory=dict)

    def add(self, steps: list[int], values: Mapping[str, Sequence[float]]) -> None:
        """Adds lines, of which the metrics in ``values`` have a value each, or NaN."""
        for name in values.keys() - self.values.keys():
            self.values[name] = array("d", [math.nan] * len(self.steps))
        absent = [math.nan] * len(steps)
        for name, column in self.values.items():
            column.extend(values.get(name, absent))
        self.steps.extend(steps)

    def known(self, name: str) -> tuple[Column, Column]:
        """The steps and values of the lines that have a value of the metric, in the order of their steps."""
        steps, values = np.asarray(self.steps), np.asarray(self.values[name])
        if not (known := ~np.isnan(values)).all():
            steps, values = steps[known], values[known]
        if (steps[1:] < steps[:-1]).any():  # some were logged between two steps
            order = np.argsort(steps, kind="stable")
            steps, values = steps[order], values[order]
        return steps, values


@dataclass
class Metrics:
    """All lines by attempt. ``names``: of the metrics, in the order in which they were first logged. ``first``: the
    first step of each attempt that has lines. ``notes``: what could not be read."""

    attempts: dict[int, Lines] = field(default_factory=dict)
    names: dict[str, None] = field(default_factory=dict)
    first: dict[int, int] = field(default_factory=dict)
    not_finite: dict[str, list[int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    lines: int = 0


def read_metrics(run: RunDirectory) -> Metrics:
    """Reads metrics.jsonl. Its errors are in the notes."""
    found, left_out, wrong, torn = Metrics(), set[str](), 0, False
    try:
        with json_lines.open_lines(run.metrics_file) as file:
            lines = json_lines.WholeLines(file)
            read = json_lines.parsed(lines, schemas.LOGGED)
            while together := list(islice(read, _TOGETHER)):
                wrong += sum(error is not None for _, error in together)
                known = (line for line, _ in together if line is not None)
                for _, alike in groupby(known, _kind):
                    _add(found, list(alike), left_out)
            torn = lines.torn
    except FileNotFoundError:
        pass
    except OSError as error:
        found.notes.append(f"could not read metrics.jsonl: {error.strerror}")
    if wrong:
        found.notes.append(f"{counted(wrong, 'line')} of metrics.jsonl skipped, because another program wrote them")
    if torn:
        found.notes.append(incomplete("metrics.jsonl"))
    if left_out:
        found.notes.append(f"{counted(len(left_out), 'metric')} left out, because a report has at most {MOST_METRICS}")
    return found


def incomplete(name: str) -> str:
    """A note about a JSON lines file."""
    return f"the last line of {name} is incomplete. It is still being written, or its writer was killed"


def _kind(line: Mapping[str, Any]) -> tuple[object, ...]:
    """Lines of the same kind have the same columns."""
    return line["attempt"], *line


def _add(found: Metrics, lines: Sequence[Mapping[str, Any]], left_out: set[str]) -> None:
    """Adds lines of one attempt that have the same keys, a column at a time."""
    attempt, steps = lines[0]["attempt"], [line["step"] for line in lines]
    found.lines += len(lines)
    found.first[attempt] = min(found.first.get(attempt, steps[0]), *steps)
    columns: dict[str, Sequence[float]] = {}
    for name in lines[0]:
        if name in schemas.NOT_METRICS:
            continue
        column = [line[name] for line in lines]
        whole = set(map(type, column)) <= _NUMBERS and all(-_LARGEST <= value <= _LARGEST for value in column)
        if not whole:
            column = [metrics_lines.with_floats({name: value})[name] for value in column]
        if not any(type(value) in _NUMBERS for value in column):
            continue
        if name not in found.names and len(found.names) >= MOST_METRICS:
            left_out.add(name)
            continue
        found.names[name] = None
        if not whole:
            wrong = [step for step, value in zip(steps, column, strict=True) if _is_not_finite(value)]
            if wrong:
                found.not_finite.setdefault(name, []).extend(wrong)
            column = [_clipped(value) for value in column]
        columns[name] = column
    found.attempts.setdefault(attempt, Lines()).add(steps, columns)


def _is_not_finite(value: object) -> bool:
    return type(value) is float and not math.isfinite(value)


def _clipped(value: Any) -> float:
    """NaN if it is not a finite number."""
    if type(value) not in _NUMBERS or _is_not_finite(value):
        return math.nan
    return float(max(-_LARGEST, min(_LARGEST, value)))


def limits(run: RunDirectory, history: RunView, metrics: Metrics) -> dict[int, float]:
    """For each attempt, the step from which its lines do not count, because a later attempt began there.

    Where an attempt began is in its resume record, which only the owner can read, and in an event. Without both, its
    first line is used. A damaged record is in the notes of the metrics.
    """
    begun = {**metrics.first, **{event.attempt: event.step for event in history.all(Beginning)}}
    for number in run.attempts():
        try:
            begun |= {number: record["step"]} if (record := run.resumed(number)) else {}
        except PermissionError:  # another user's run
            break
        except (RunDirectoryError, OSError) as error:
            metrics.notes.append(str(error))
    found, least = {}, math.inf
    for attempt in sorted(begun, reverse=True):
        found[attempt] = least
        least = min(least, begun[attempt])
    return found


def curves(metrics: Metrics, limit: Mapping[int, float]) -> list[dict[str, Any]]:
    """Each metric's curves, and its newest value. ``limit``: as ``limits`` returns it."""
    return [_metric(name, metrics, limit) for name in metrics.names]


def _metric(name: str, metrics: Metrics, limit: Mapping[int, float]) -> dict[str, Any]:
    logged = {number: lines.known(name) for number, lines in metrics.attempts.items() if name in lines.values}
    own = {number: columns for number, columns in sorted(logged.items()) if columns[0].size}
    grid = Grid(float(end) for steps, _ in own.values() for end in (steps[0], steps[-1]))
    counting: list[tuple[Column, Column]] = [(np.empty(0), np.empty(0))]
    discarded = []
    for attempt, (steps, values) in own.items():
        until = _where(steps, limit.get(attempt, math.inf))
        counting.append((steps[:until], values[:until]))
        if until < steps.size:
            discarded.append({"attempt": attempt, "points": grid.reduced(steps[until:], values[until:])})
    steps, values = (np.concatenate(columns) for columns in zip(*counting, strict=True))
    return {
        "name": name,
        "values": sum(values.size for _, values in own.values()),
        "last": {"step": int(steps[-1]), "value": float(values[-1])} if steps.size else None,
        "best": _best(name, steps, values) if steps.size else None,
        "steps": grid.reduced(steps, values),
        "discarded": discarded,
        "not_finite": _not_finite(metrics, name),
    }


def _best(name: str, steps: Column, values: Column) -> dict[str, Any]:
    """The best of the values that count: the smallest of a loss or an error, the largest of others."""
    smallest = is_loss(name)
    place = (np.argmin if smallest else np.argmax)(values)
    return {"step": int(steps[place]), "value": float(values[place]), "smallest": smallest}


def _not_finite(metrics: Metrics, name: str) -> dict[str, int] | None:
    steps = metrics.not_finite.get(name)
    return None if steps is None else {"count": len(steps), "step": min(steps)}


def _where(steps: Column, limit: float) -> int:
    """How many of an attempt's lines, which are in the order of their steps, count."""
    beyond = np.flatnonzero(steps >= limit)
    return int(beyond[0]) if beyond.size else steps.size


class Grid:
    """BUCKETS equal parts of the range of some numbers."""

    def __init__(self, numbers: Iterable[float]) -> None:
        known = list(numbers)
        self._low = min(known, default=0.0)
        # a little wider, to put the largest into the last part
        self._width = (max(known, default=0.0) - self._low) / BUCKETS * (1 + 1e-9)

    def reduced(self, xs: npt.ArrayLike, ys: npt.ArrayLike) -> list[Point]:
        """The points of a curve in the order of ``xs``."""
        x, y = np.asarray(xs), np.asarray(ys, dtype=float)
        if not x.size:
            return []
        parts = np.subtract(x, self._low, dtype=float)
        parts /= self._width or 1.0
        parts = parts.astype(np.int16)
        begins = np.append(0, 1 + np.flatnonzero(parts[1:] != parts[:-1]))
        numbers = np.diff(begins, append=x.size)
        low, high = np.minimum.reduceat(y, begins), np.maximum.reduceat(y, begins)
        mean = np.clip(np.add.reduceat(y, begins) / numbers, low, high)
        points = np.stack([np.add.reduceat(x, begins, dtype=float) / numbers, mean, low, high], axis=1)
        return [[_short(value) for value in point] for point in points.tolist()]


def _short(value: float) -> float:
    """A number with six digits, which is more than a chart shows. Whole numbers are unchanged."""
    return float(f"{value:.6g}") if value % 1 else value
