"""A run's metrics as curves of bounded size, over steps and over hours, with repeated steps kept apart.

A curve is a list of points ``[x, mean, low, high]``: one for each of at most BUCKETS equal parts of its range that has
values. The file is read once, line by line.

Of several runs, the best one has the best newest value of the metric by which most of them are judged.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from clusterddp.errors import RunDirectoryError
from clusterddp.jobdef.job import is_loss
from clusterddp.reporter import counted
from clusterddp.rundir import records
from clusterddp.rundir.run_directory import RunDirectory

Point = list[float]
Column = npt.NDArray[Any]
#: The maximum number of points of a curve, and of metrics to read.
BUCKETS, MOST_METRICS = 1000, 100
#: Larger values are clipped, to keep differences between values finite.
_LARGEST = 1e300
#: The types of a value that is drawn, and how many lines are sorted into columns at once.
_NUMBERS, _TOGETHER = frozenset((int, float, bool)), 250


@dataclass
class Lines:
    """The lines of one attempt as columns. NaN: a time that was not recorded, or a value that a line does not have."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    times: array[float] = field(default_factory=lambda: array("d"))
    values: dict[str, array[float]] = field(default_factory=dict)

    def add(self, steps: list[int], times: list[float], values: Mapping[str, Sequence[float]]) -> None:
        """Adds lines, of which the metrics in ``values`` have a value each, or NaN."""
        for name in values.keys() - self.values.keys():
            self.values[name] = array("d", [math.nan] * len(self.steps))
        absent = [math.nan] * len(steps)
        for name, column in self.values.items():
            column.extend(values.get(name, absent))
        self.steps.extend(steps)
        self.times.extend(times)

    def known(self, name: str) -> tuple[Column, Column, Column]:
        """The steps, times and values of the lines that have a value of the metric, in the order of their steps."""
        steps, times, values = np.asarray(self.steps), np.asarray(self.times), np.asarray(self.values[name])
        if not (known := ~np.isnan(values)).all():
            steps, times, values = steps[known], times[known], values[known]
        if (steps[1:] < steps[:-1]).any():  # some were logged between two steps
            order = np.argsort(steps, kind="stable")
            steps, times, values = steps[order], times[order], values[order]
        return steps, times, values


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
        with records.open_lines(run.metrics_file) as file:
            lines = records.WholeLines(file)
            read = records.parsed(lines, records.LOGGED)
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
    times = [float(line["time"]) if records.is_time(line.get("time")) else math.nan for line in lines]
    found.lines += len(lines)
    found.first[attempt] = min(found.first.get(attempt, steps[0]), *steps)
    columns: dict[str, Sequence[float]] = {}
    for name in lines[0]:
        if name in records.NOT_METRICS:
            continue
        column = [line[name] for line in lines]
        whole = set(map(type, column)) <= _NUMBERS and all(-_LARGEST <= value <= _LARGEST for value in column)
        if not whole:
            column = [records.with_floats({name: value})[name] for value in column]
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
    found.attempts.setdefault(attempt, Lines()).add(steps, times, columns)


def _is_not_finite(value: object) -> bool:
    return type(value) is float and not math.isfinite(value)


def _clipped(value: Any) -> float:
    """NaN if it is not a finite number."""
    if type(value) not in _NUMBERS or _is_not_finite(value):
        return math.nan
    return float(max(-_LARGEST, min(_LARGEST, value)))


def limits(run: RunDirectory, events: Iterable[Mapping[str, Any]], metrics: Metrics) -> dict[int, float]:
    """For each attempt, the step from which its lines do not count, because a later attempt began there.

    Where an attempt began is in its resume record, which only the owner can read, and in an event. Without both, its
    first line is used. A damaged record is in the notes of the metrics.
    """
    begun: dict[int, int] = dict(metrics.first)
    for event in events:
        if event["event"] in ("training", "resumed") and records.is_count(event.get("step")):
            begun[event["attempt"]] = event["step"]
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


def curves(metrics: Metrics, limit: Mapping[int, float], began: float, buckets: int = BUCKETS) -> list[dict[str, Any]]:
    """Each metric's curves, and its newest value. ``began``: unix seconds from which on the hours count."""
    found = []
    for name in metrics.names:
        logged = {attempt: lines.known(name) for attempt, lines in metrics.attempts.items() if name in lines.values}
        own = {attempt: columns for attempt, columns in logged.items() if columns[0].size}
        steps = Grid((float(end) for numbers, _, _ in own.values() for end in (numbers[0], numbers[-1])), buckets)
        timed = (times[~np.isnan(times)] for _, times, _ in own.values())
        ends = (float(end) for part in timed if part.size for end in (part.min(), part.max()))
        hours = Grid(((end - began) / 3600 for end in ends), buckets)
        found.append(_metric(name, own, limit, (steps, hours, began)) | {"not_finite": _not_finite(metrics, name)})
    return found


def _metric(
    name: str,
    own: Mapping[int, tuple[Column, Column, Column]],
    limit: Mapping[int, float],
    grids: tuple[Grid, Grid, float],
) -> dict[str, Any]:
    steps, hours, began = grids
    counted_lines: list[tuple[Column, Column]] = []
    discarded: list[dict[str, Any]] = []
    over_hours: list[dict[str, Any]] = []
    for attempt in sorted(own):
        until = _where(own[attempt][0], limit.get(attempt, math.inf))
        for counts, chosen in ((True, slice(0, until)), (False, slice(until, None))):
            numbers, times, values = (column[chosen] for column in own[attempt])
            if not numbers.size:
                continue
            if counts:
                counted_lines.append((numbers, values))
            else:
                discarded.append({"attempt": attempt, "points": steps.reduced(numbers, values)})
            timed = hours.reduced((times - began) / 3600, values)
            if timed:
                over_hours.append({"attempt": attempt, "counts": counts, "points": timed})
    counted_lines = counted_lines or [(np.empty(0), np.empty(0))]
    numbers, values = (np.concatenate(columns) for columns in zip(*counted_lines, strict=True))
    return {
        "name": name,
        "values": sum(values.size for _, _, values in own.values()),
        "last": {"step": int(numbers[-1]), "value": float(values[-1])} if numbers.size else None,
        "best": _best(name, numbers, values) if numbers.size else None,
        "steps": steps.reduced(numbers, values),
        "discarded": discarded,
        "hours": over_hours,
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

    def __init__(self, numbers: Iterable[float], buckets: int = BUCKETS) -> None:
        known = list(numbers)
        self._low = min(known, default=0.0)
        self._width = (
            (max(known, default=0.0) - self._low) / buckets * (1 + 1e-9)
        )  # to put the largest into the last part

    def reduced(self, xs: npt.ArrayLike, ys: npt.ArrayLike) -> list[Point]:
        """The points of a curve in the order of ``xs``. Those whose x is NaN are left out."""
        x, y = np.asarray(xs), np.asarray(ys, dtype=float)
        if (unknown := np.isnan(x)).any():
            x, y = x[~unknown], y[~unknown]
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
        return [[short(value) for value in point] for point in points.tolist()]


def short(value: float) -> float:
    """A number with six digits, which is more than a chart shows. Whole numbers are unchanged."""
    return float(f"{value:.6g}") if value % 1 else value


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most ``most`` points of a curve, after joining neighbours."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / most)
    parts = [points[at : at + size] for at in range(0, len(points), size)]
    return [
        [
            sum(point[0] for point in part) / len(part),
            sum(point[1] for point in part) / len(part),
            min(point[2] for point in part),
            max(point[3] for point in part),
        ]
        for part in parts
    ]


Run = Mapping[str, Any]
#: States of runs that are ranked, as in ``list --best``. The others ended early.
RANKED = ("completed", "running", "held", "pending")


def main_of(runs: Sequence[Run]) -> str | None:
    """The metric by which most runs are judged, or None if none was logged."""
    mains = Counter(run["metrics"][0]["name"] for run in runs if run["metrics"])
    return mains.most_common(1)[0][0] if mains else None


def newest(run: Run, name: str | None) -> Mapping[str, Any] | None:
    """The newest value of a metric, with its step, or None."""
    found: Mapping[str, Any] | None = next((one["last"] for one in run["metrics"] if one["name"] == name), None)
    return found


def ranked(runs: Sequence[Run], name: str | None) -> list[Run]:
    """The runs, best first and then by name, followed by those that failed or have no value, in their order."""
    own = [one["best"] for run in runs for one in run["metrics"] if one["name"] == name]
    smallest = any(best["smallest"] for best in own if best)

    def key(run: Run) -> tuple[bool, float, str]:
        value = newest(run, name) if run["state"] in RANKED else None
        if value is None:
            return True, 0.0, ""
        return False, value["value"] if smallest else -value["value"], str(run["name"])

    return sorted(runs, key=key)


def has_rank(run: Run, name: str | None) -> bool:
    """Whether a run is compared with the others."""
    return run["state"] in RANKED and newest(run, name) is not None


def label(run: Run) -> str:
    """The label that identifies a run: its parameters, or else its name."""
    return ", ".join(f"{key}={value}" for key, value in run["values"].items()) or str(run["name"])


def parameters(runs: Sequence[Run]) -> dict[str, list[str]]:
    """The keys of a sweep that have several values, with these in order: numbers, then texts."""
    found: dict[str, list[str]] = {}
    for key in dict.fromkeys(key for run in runs for key in run["values"]):
        values = {run["values"][key] for run in runs if key in run["values"]}
        if len(values) > 1:
            found[key] = sorted(values, key=_in_order)
    return found


def _in_order(text: str) -> tuple[bool, float, str]:
    try:
        value = float(text)
    except ValueError:
        return True, 0.0, text
    return False, value if value == value else 0.0, text
