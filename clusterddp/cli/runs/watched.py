"""What ``list --watch`` shows besides the table of ``list``: a metric's curve, the booked time, the newest events."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from clusterddp.cli.runs.report import booked, moment, values
from clusterddp.cli.runs.sparkline import sparkline
from clusterddp.cli.runs.table import Row
from clusterddp.cli.runs.text import one_line
from clusterddp.reporter import duration
from clusterddp.rundir.curve import curve, main_metric
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.supervisor.messages import sentence

#: The columns of a curve, and the most events of each run and in all.
CURVE_COLUMNS, EVENTS = 12, 20
Event = Mapping[str, Any]


@dataclass(frozen=True)
class Watched:
    """``columns``: texts by run directory, by the column's name. ``events``: lines, oldest first."""

    columns: Mapping[str, Mapping[Path, str]]
    events: list[str]


def watched(rows: Sequence[Row], metrics: Sequence[str], encoding: str) -> Watched:
    """What is shown of these runs; ``metrics``: those of --show, the first of which is drawn."""
    now = time.time()
    trends, times, events = dict[Path, str](), dict[Path, str](), list[tuple[float, str]]()
    for row in rows:
        run, history = row.summary.run, _history(row.summary.run)
        trends[run.path] = _trend(row, next(iter(metrics), None), history, encoding)
        made = booked(row.summary, row.state, history, now)[1]
        times[run.path] = f"{100 * made.ettr:.0f}% of {duration(made.total_s)}" if made else ""
        events += _newest(row, history)
    events.sort()
    lines = [f"{moment(at)}  {words}" for at, words in events[-EVENTS:]]
    return Watched({"trend": trends, "ettr": times}, lines)


def _history(run: RunDirectory) -> tuple[dict[str, Any], ...]:
    """A run's events; read again only when there are more of them."""
    try:
        return _history_of(run.path, run.events_file.stat().st_size)
    except OSError:  # none yet, or another user's
        return ()


@lru_cache(maxsize=100)
def _history_of(run: Path, _size: int) -> tuple[dict[str, Any], ...]:
    return tuple(RunDirectory(run).events())


def _trend(row: Row, metric: str | None, history: Sequence[Event], encoding: str) -> str:
    name = metric or main_metric(values(row.summary))
    points = curve(row.summary.run.metrics_file, name, CURVE_COLUMNS, history) if name else []
    return sparkline(points, CURVE_COLUMNS, encoding) if len(points) > 1 else ""


def _newest(row: Row, history: Sequence[Event]) -> list[tuple[float, str]]:
    """When a run's newest events happened, and their sentences."""
    found: list[tuple[float, str]] = []
    for event in reversed(history):
        if words := sentence(event):
            found.append((event["time"], one_line(f"{row.summary.name}: {' '.join(words.split())}")))
        if len(found) == EVENTS:
            break
    return found
