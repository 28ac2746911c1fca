"""The progress of a run: its newest step and speed, and the course of a metric.

The course of a metric comes from few parts of metrics.jsonl, so that ``--watch`` can read it every few seconds. The
newest step, metrics and seconds per step come from the end of the file.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from clusterddp.reporter import duration, speed
from clusterddp.rundir import records
from clusterddp.rundir.files import open_binary
from clusterddp.rundir.records import is_count

#: Bytes read at each place of a large file, and the most values taken from there.
_BLOCK, _VALUES = 1 << 13, 8

Point = tuple[int, float]


def curve(path: Path, name: str, places: int, events: Iterable[Mapping[str, Any]] = ()) -> list[Point]:
    """Steps and values of a metric, from equally distant ``places`` of the file and both of its ends.

    Lines that a later attempt discarded, according to the history, are left out. Empty if the file cannot be read.
    """
    counting = records.counts({event["attempt"]: event["step"] for event in events if _begins(event)})
    points: dict[int, float] = {}
    for text in _lines(path, json.dumps(name).encode(), places):
        line = records.parse(text, records.METRICS)[0]
        if line is None or not counting(line):
            continue
        value = records.with_floats(line).get(name)
        if isinstance(value, (int, float)):
            points[line["step"]] = float(value)
    return sorted(points.items())


def main_metric(values: Mapping[str, Any]) -> str | None:
    """The metric that is shown if none is named: ``loss``, else one with that in its name, else the first."""
    names = [name for name in values if name not in records.NOT_METRICS]
    losses = [name for name in names if "loss" in name.lower()]
    return "loss" if "loss" in names else next(iter([*losses, *names]), None)


def _begins(event: Mapping[str, Any]) -> bool:
    return event["event"] in ("training", "resumed") and is_count(event.get("step"))


def _lines(path: Path, key: bytes, places: int) -> Iterator[bytes]:
    """Complete lines that contain ``key``: a few of each place, the first and the last of the file among them."""
    try:
        with open_binary(path, buffered=False) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= places * _BLOCK:
                yield from _few(file.read().split(b"\n")[:-1], key, places * _VALUES)
                return
            for place in range(places):
                begin = place * (size - _BLOCK) // (places - 1)
                file.seek(begin)
                lines = file.read(_BLOCK).split(b"\n")
                yield from _few(lines[begin > 0 : -1], key, _VALUES)
    except OSError:  # not there yet, or another user's
        return


def _few(lines: list[bytes], key: bytes, most: int) -> list[bytes]:
    """At most ``most`` lines with the key, including the first and the last."""
    found = [line for line in lines if key in line]
    if len(found) <= most:
        return found
    return [found[index * (len(found) - 1) // (most - 1)] for index in range(most)]


_RECENT_BYTES = 1 << 14
#: The most metrics lines that a speed is taken from, and the most metrics that are named.
SAMPLES, MOST_METRICS = 12, 3


@dataclass(frozen=True)
class Recent:
    """``done``: steps. ``values``: the metrics of the newest step that logged any."""

    attempt: int
    done: int
    values: Mapping[str, Any]
    seconds_per_step: float | None

    def words(self, steps: int | None) -> str:
        """``2.1 steps/s, 30 min left, loss 0.412, accuracy 0.91``. ``steps``: of the whole run."""
        rate = speed(self.seconds_per_step)
        parts = [f"{rate.removesuffix('/s')} steps/s" if rate.endswith("/s") else rate] if rate else []
        if self.seconds_per_step and steps is not None:
            parts.append(f"{duration(max(0, steps - self.done) * self.seconds_per_step)} left")
        main = main_metric(self.values)
        names = [main, *(name for name in self.values if name != main)] if main else []
        parts += [f"{name} {_number(self.values[name])}" for name in names[:MOST_METRICS]]
        return ", ".join(parts)

    def line(self, steps: int | None) -> str:
        """``step 1200/5000, 2.1 steps/s, 30 min left, loss 0.412``."""
        words = self.words(steps)
        return f"step {self.done}{'' if steps is None else f'/{steps}'}{f', {words}' if words else ''}"


def recent(path: Path) -> Recent | None:
    """The values at the end of metrics.jsonl. None if there is no line yet, or it cannot be read."""
    try:
        texts = records.last_lines(path, _RECENT_BYTES)
    except OSError:
        return None
    texts.reverse()
    lines = (line for text in texts if (line := records.parse(text, records.METRICS)[0]) is not None)
    newest = next(lines, None)
    if newest is None:
        return None
    values = _metrics(newest) or next((found for line in lines if (found := _metrics(line))), {})
    sample = records.parsed(texts[:: len(texts) // SAMPLES + 1], records.METRICS)
    seconds = pace([line for line, _ in sample if line is not None])
    return Recent(newest["attempt"], newest["step"] + 1, values, seconds)


def pace(newest_first: Sequence[Mapping[str, Any]]) -> float | None:
    """The median of the seconds per step between metrics lines of one attempt, on which few pauses have no effect."""
    own = [line for line in newest_first if line["attempt"] == newest_first[0]["attempt"] and has_time(line)]
    paces = [(b["time"] - a["time"]) / (b["step"] - a["step"]) for b, a in pairwise(own) if b["step"] > a["step"]]
    return statistics.median(paces) if paces and statistics.median(paces) > 0 else None


def has_time(line: Mapping[str, Any]) -> bool:
    """Whether a line has the time of its step."""
    return records.is_time(line.get("time"))


def _metrics(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in records.with_floats(line).items() if name not in records.NOT_METRICS}


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
