"""The section about ranks over time: a heat map by host, the ranks that were slow, and the phases of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from clusterddp.report.charts import WIDTH, Curve, chart, ruler, zoomable
from clusterddp.report.ranks import COST
from clusterddp.report.sections import Section, legend, plain, section
from clusterddp.report.theme import LEVELS, Axis, Markup, tag, time_axis
from clusterddp.reporter import duration
from clusterddp.rundir.timing import PHASES

_Rows = Sequence[Mapping[str, Any]]
#: The phases of a step: their words, and the colours of their lines.
_PHASES = {
    "data_s": ("waiting for the batch", "starting"),
    "own_s": ("own compute time", "training"),
    "wait_s": ("waiting for other ranks", "stuck"),
    "save_s": ("blocked by a save", "saving"),
}
#: Minimum and maximum height of a row in pixels, and the approximate height of all rows together.
_LOW, _HIGH, _ALL = 5, 14, 320
#: Units of a row's height in its drawing. One of them is the gap to the next row.
_ROW = 10
_INTRO = (
    "How much longer than the median rank each rank took for its own part of a step: waiting for its batch, and its "
    "own compute time. The other ranks wait that long for it."
)


def ranks_over_time(run: Mapping[str, Any]) -> Section | None:
    """The section, or None for a run whose ranks were not timed."""
    found = run["ranks"]
    if found is None:
        return None
    seconds = found["part_s"] * found["parts"]
    axis, marks = time_axis(seconds, found["begin"])
    parts: list[Markup | None] = []
    if found["ranks"] > 1:
        words = tag("p", _INTRO, class_="quiet")
        colours = legend((level, text) for level, (_, text) in LEVELS.items())
        parts += [words, colours, _map(found, axis, marks, run["began"]), _slow(found)]
    parts.append(_phases(found, run["began"]))
    return section("Ranks over time", "ranks", *parts)


def _map(found: Mapping[str, Any], axis: Axis, marks: Sequence[tuple[float, str]], began: float) -> Markup:
    """The rows of a host, beside its name."""
    rows = found["rows"]
    height = max(_LOW, min(_HIGH, _ALL // len(rows)))
    cells: list[Markup] = []
    for host, grouped in groupby(rows, key=lambda row: row["host"]):
        own = list(grouped)
        name = _name(host)
        cells += [tag("div", tag("b", name), " ", tag("span", _ranks(own), class_="quiet")), _drawn(own, name, height)]
    return zoomable([*cells, tag("div"), ruler(marks, axis)], axis, began, "Ranks over time", class_="heat")


def _name(host: str | None) -> str:
    if host is None:
        return "the other hosts"
    return plain(host) or "host unknown"


def _ranks(rows: _Rows) -> str:
    """``ranks 0-7``."""
    numbers = sorted({rank for row in rows for rank in row["ranks"]})
    pieces = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        own = [number for _, number in run]
        pieces.append(str(own[0]) if len(own) == 1 else f"{own[0]}-{own[-1]}")
    shown = ", ".join(pieces[:4]) + (", ..." if len(pieces) > 4 else "")
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"


def _drawn(rows: _Rows, name: str, height: int) -> Markup:
    """One path per level: a box for each stretch of time."""
    boxes: dict[str, list[str]] = {level: [] for level in LEVELS}
    for place, row in enumerate(rows):
        at, parts = 0, len(row["excess"])
        for level, stretch in groupby(map(_level, row["excess"])):
            length = len(list(stretch))
            left, right = (round(WIDTH * part / parts) for part in (at, at + length))
            at += length
            if level is not None:
                boxes[level].append(f"M{left} {_ROW * place}h{right - left}v{_ROW - 1}H{left}z")
    drawn = [
        tag("path", tag("title", f"{name}: {LEVELS[level][1]}"), class_=f"f-{level}", d="".join(own))
        for level, own in boxes.items()
        if own
    ]
    box = {"viewBox": f"0 0 {WIDTH} {_ROW * len(rows)}", "preserveAspectRatio": "none"}
    known = [value for row in rows for value in row["excess"] if value is not None]
    label = f"{name}, {_ranks(rows)}: at most {100 * max(known, default=0.0):.0f}% of a step"
    picture = tag("svg", *drawn, height=height * len(rows), **box)
    return tag("svg", picture, height=height * len(rows), role="img", aria_label=label)


def _level(excess: float | None) -> str | None:
    if excess is None:
        return None
    return [level for level, (least, _) in LEVELS.items() if excess >= least][-1]


def _slow(found: Mapping[str, Any]) -> Markup:
    """The ranks that cost most, a sentence each."""
    if not found["slow"]:
        return tag("p", f"No slow rank made the others wait for {100 * COST:.0f}% of the time.")
    return tag("div", tag("h3", "Slow ranks"), tag("ul", *(tag("li", *_of_slow(one)) for one in found["slow"])))


def _of_slow(one: Mapping[str, Any]) -> Iterable[object]:
    yield tag("b", f"Rank {one['rank']} on {plain(one['host']) or 'an unknown host'}")
    per_step = f"{_seconds(one['work_s'])} per step instead of {_seconds(one['median_s'])}"
    yield f": {per_step}, for {duration(one['slow_s'])}. "
    yield f"The slow part was {_PHASES[one['phase']][0]}. "
    yield f"The other ranks spent {100 * one['excess']:.0f}% of their training time waiting for it."


def _seconds(value: float) -> str:
    return f"{1000 * value:.3g} ms" if value < 0.9995 else f"{value:.3g} s"


def _phases(found: Mapping[str, Any], began: float) -> Markup | None:
    """The phases of a step of the median rank, over time."""
    curves = []
    for phase in PHASES:
        points = [
            [found["begin"] - began + (part + 0.5) * found["part_s"], *(value,) * 3]
            for part, value in enumerate(found["median"][phase])
            if value is not None
        ]
        words, colour = _PHASES[phase]
        if points:
            curves.append(Curve(_pieces(points, found["part_s"]), colour, words, band=False, from_zero=True))
    if not curves:
        return None
    latest = found["begin"] - began + found["part_s"] * found["parts"]
    axis, marks = time_axis(latest)
    names = legend((curve.colour, curve.title) for curve in curves)
    who = "the median rank" if found["ranks"] > 1 else "the rank"
    drawing = chart(curves, axis, marks, "Seconds per step over time", 4 * found["parts"])
    caption = tag("figcaption", f"Seconds per step of {who}, over the time since the first submission")
    return tag("div", tag("h3", "What a step consists of"), names, tag("figure", caption, drawing))


def _pieces(points: Sequence[list[float]], width: float) -> list[list[list[float]]]:
    """The points, split where the run had no steps for a long time."""
    found: list[list[list[float]]] = []
    for point in points:
        if not found or point[0] - found[-1][-1][0] > 2.5 * width:
            found.append([])
        found[-1].append(point)
    return found
