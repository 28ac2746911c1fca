"""A run's metrics as curves of bounded size: over steps and over hours, with what later attempts discarded apart.

A curve is a list of points ``[x, mean, low, high]``: one for each of at most BUCKETS equal parts of its range that has
values. The file is read once, line by line.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clusterddp.errors import RunDirectoryError
from clusterddp.reporter import counted
from clusterddp.rundir import records
from clusterddp.rundir.run_directory import RunDirectory

Point = list[float]
#: The most points of a curve, and the most metrics that are read.
BUCKETS, MOST_METRICS = 1000, 100
#: Larger values are cut, so that differences between values stay finite.
_LARGEST = 1e300


@dataclass
class _Values:
    """The values of one metric in one attempt. A time that was not recorded is NaN."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    times: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))


@dataclass
class Metrics:
    """All values by metric and attempt. ``first``: the first step of each attempt that has lines; ``notes``: what
    could not be read."""

    values: dict[str, dict[int, _Values]] = field(default_factory=dict)
    first: dict[int, int] = field(default_factory=dict)
    not_finite: dict[str, list[int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    lines: int = 0


def read_metrics(run: RunDirectory) -> Metrics:
    """Reads metrics.jsonl; what is wrong with it is in the notes."""
    found, left_out, wrong, torn = Metrics(), set[str](), 0, False
    try:
        with open(run.metrics_file, "rb") as file:
            for text in file:
                torn = not text.endswith(b"\n")
                line, error = (None, None) if torn else records.parse(text, records.METRICS)
                wrong += error is not None
                if line is not None:
                    _add(found, records.with_floats(line), left_out)
    except FileNotFoundError:
        pass
    except OSError as error:
        found.notes.append(f"metrics.jsonl cannot be read: {error.strerror}")
    if wrong:
        found.notes.append(f"{counted(wrong, 'line')} of metrics.jsonl cannot be read: written by another program")
    if torn:
        found.notes.append(incomplete("metrics.jsonl"))
    if left_out:
        found.notes.append(f"{counted(len(left_out), 'metric')} left out: a report has at most {MOST_METRICS}")
    return found


def incomplete(name: str) -> str:
    """A note about a JSON lines file."""
    return f"the last line of {name} is incomplete: it is still being written, or its writer was killed"


def _add(found: Metrics, line: Mapping[str, Any], left_out: set[str]) -> None:
    step, attempt, time = line["step"], line["attempt"], line.get("time")
    found.lines += 1
    found.first[attempt] = min(step, found.first.get(attempt, step))
    for name, value in line.items():
        if name in records.NOT_METRICS or type(value) not in (int, float, bool):
            continue
        if name not in found.values:
            if len(found.values) >= MOST_METRICS:
                left_out.add(name)
                continue
            found.values[name] = {}
        if value != value or value in (math.inf, -math.inf):
            found.not_finite.setdefault(name, []).append(step)
            continue
        own = found.values[name].setdefault(attempt, _Values())
        own.steps.append(step)
        own.times.append(float(time) if time is not None and records.is_time(time) else math.nan)
        own.values.append(float(max(-_LARGEST, min(_LARGEST, value))))


def limits(run: RunDirectory, events: Iterable[Mapping[str, Any]], metrics: Metrics) -> dict[int, float]:
    """For each attempt the step from which on its lines do not count: a later attempt began there.

    Where an attempt began is in its resume record, which only the owner can read, and in an event; failing both, its
    first line tells. A damaged record is in the notes of the metrics.
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
    for name, own in metrics.values.items():
        steps = Grid((step for part in own.values() for step in _ends(part.steps)), buckets)
        times = (time for part in own.values() for time in part.times if time == time)
        hours = Grid(((time - began) / 3600 for time in times), buckets)
        found.append(_metric(name, own, limit, (steps, hours, began)) | {"not_finite": _not_finite(metrics, name)})
    return found


def _metric(
    name: str, own: Mapping[int, _Values], limit: Mapping[int, float], grids: tuple[Grid, Grid, float]
) -> dict[str, Any]:
    steps, hours, began = grids
    counted_steps, counted_values = array("q"), array("d")
    discarded: list[dict[str, Any]] = []
    over_hours: list[dict[str, Any]] = []
    for attempt in sorted(own):
        part = own[attempt]
        until = _where(part.steps, limit.get(attempt, math.inf))
        for counts, chosen in ((True, slice(0, until)), (False, slice(until, None))):
            numbers, values = part.steps[chosen], part.values[chosen]
            if not numbers:
                continue
            if counts:
                counted_steps += numbers
                counted_values += values
            else:
                discarded.append({"attempt": attempt, "points": steps.reduced(numbers, values)})
            timed = hours.reduced([(time - began) / 3600 for time in part.times[chosen]], values)
            if timed:
                over_hours.append({"attempt": attempt, "counts": counts, "points": timed})
    return {
        "name": name,
        "values": sum(len(part.values) for part in own.values()),
        "last": {"step": counted_steps[-1], "value": counted_values[-1]} if counted_steps else None,
        "steps": steps.reduced(counted_steps, counted_values),
        "discarded": discarded,
        "hours": over_hours,
    }


def _not_finite(metrics: Metrics, name: str) -> dict[str, int] | None:
    steps = metrics.not_finite.get(name)
    return None if steps is None else {"count": len(steps), "step": min(steps)}


def _ends(steps: Sequence[int]) -> Sequence[int]:
    return (steps[0], steps[-1]) if steps else ()


def _where(steps: Sequence[int], limit: float) -> int:
    """How many of an attempt's lines, which are in the order of their steps, count."""
    return (
        next((index for index, step in enumerate(steps) if step >= limit), len(steps))
        if limit < math.inf
        else len(steps)
    )


class Grid:
    """BUCKETS equal parts of the range of some numbers."""

    def __init__(self, numbers: Iterable[float], buckets: int = BUCKETS) -> None:
        known = list(numbers)
        self._low = min(known, default=0.0)
        self._width = (max(known, default=0.0) - self._low) / buckets * (1 + 1e-9)  # so that the largest is in the last

    def reduced(self, xs: Sequence[float], ys: Sequence[float]) -> list[Point]:
        """The points of a curve in the order of ``xs``; those whose x is NaN are left out."""
        found: list[Point] = []
        bucket, number = None, 0
        for x, y in zip(xs, ys, strict=True):
            if x != x:
                continue
            here = int((x - self._low) / self._width) if self._width else 0
            if here != bucket:
                if number > 1:
                    _close(found[-1], number)
                found.append([x, y, y, y])
                bucket, number = here, 1
                continue
            point = found[-1]
            point[0] += x
            point[1] += y
            if y < point[2]:
                point[2] = y
            elif y > point[3]:
                point[3] = y
            number += 1
        if number > 1:
            _close(found[-1], number)
        return [[short(value) for value in point] for point in found]


def _close(point: Point, number: int) -> None:
    """Sums become means."""
    point[0] /= number
    point[1] = min(max(point[1] / number, point[2]), point[3])


def short(value: float) -> float:
    """A number with six digits, which is more than a chart shows; a whole one as it is."""
    return float(f"{value:.6g}") if value % 1 else value


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most ``most`` points of a curve: neighbours become one."""
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
