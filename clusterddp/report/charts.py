"""Charts as inline SVG: lanes of a timeline, bars, curves. Pure functions from numbers to markup.

A drawing stretches to the width of its page: lines are in a picture that is scaled in one direction, while their width
and all texts keep their size. A chart is therefore readable on a phone and on paper.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from clusterddp.report.booking import CATEGORIES
from clusterddp.report.curves import Point
from clusterddp.report.theme import GROUP_OF, Markup, tag
from clusterddp.reporter import duration

#: The units of a drawing: its width, and the height of curves.
_WIDTH, _HEIGHT = 2000, 1000
#: Heights in pixels: of a lane, of a plot, and of the texts above and below it.
_LANE, _PLOT, _ABOVE, _BELOW = 12, 150, 14, 20
#: Units of a lane's height, and the part of its width below which alternating categories are drawn together.
_LANE_UNITS, _LANE_PARTS = 100, 40
_MIXED = ("training", "straggler")

Marks = Sequence[tuple[float, str]]


# --- scales

#: A scale is logarithmic from this ratio of its largest to its smallest value on, if all are positive.
_LOGARITHMIC = 30.0
#: Units of time: the least seconds that they are used for, and the seconds of one.
_UNITS = (("s", 0.0, 1.0), ("min", 180.0, 60.0), ("h", 3 * 3600.0, 3600.0), ("d", 72 * 3600.0, 86400.0))


@dataclass(frozen=True)
class Axis:
    """``low`` and ``high``: the values at 0 and at 1."""

    low: float
    high: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """Where a value lies, from 0 to 1. Values outside of the scale lie at its ends."""
        if self.logarithmic:
            low, high, value = math.log10(self.low), math.log10(self.high), math.log10(max(value, self.low))
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def ticks(self, most: int = 5) -> list[tuple[float, str]]:
        """At most ``most`` round values, with their texts."""
        values = self._powers(most) if self.logarithmic else self._multiples(most)
        texts = [number(value) for value in values]
        if len(set(texts)) < len(texts):  # they differ less than ``number`` shows
            texts = [f"{value:.9g}" for value in values]
        return list(zip(values, texts, strict=True))

    def _multiples(self, most: int) -> list[float]:
        step = _round_step((self.high - self.low) / most)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)][: most + 1]

    def _powers(self, most: int) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        decades = [10.0**power for power in range(first, last + 1) if -300 < power < 300]
        found = [value for value in decades if self.low <= value <= self.high]
        if len(found) < 2:
            finer = (factor * value for value in decades for factor in (1, 2, 5))
            found = [value for value in finer if self.low <= value <= self.high]
        return found[:: max(1, math.ceil(len(found) / most))]


def axis_of(values: Iterable[float]) -> Axis:
    """The scale for some values: linear, or logarithmic if they are positive and far apart."""
    known = list(values)
    low, high = min(known, default=0.0), max(known, default=1.0)
    if low > 0 and high / low >= _LOGARITHMIC:
        return Axis(low, high, logarithmic=True)
    if high - low <= 1e-9 * max(abs(high), abs(low)):  # all equal
        pad = 0.1 * abs(high) or 1.0
        return Axis(low - pad, high + pad)
    return Axis(low, high)


def _round_step(least: float) -> float:
    """The next of 1, 2, 5, 10, ... that is at least ``least``."""
    power = 10.0 ** math.floor(math.log10(max(least, 1e-300)))
    return next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= least * (1 - 1e-9))


def number(value: float) -> str:
    """A number in its usual form: ``20,000``, ``0.25``, ``1e-7``."""
    if value == 0:
        return "0"
    size = abs(value)
    if 1e-3 <= size < 1e7:
        text = f"{value:,.4f}" if size < 1 else f"{value:,.2f}" if size < 1000 else f"{value:,.0f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def time_axis(seconds: float, origin: float) -> tuple[Axis, Marks]:
    """The scale of a duration, in seconds from ``origin``, and its marks with their unit."""
    name, size = [(name, size) for name, least, size in _UNITS if seconds >= least][-1]
    axis = Axis(0.0, max(seconds, 1.0) / size)
    marks = [(origin + value * size, f"{text} {name}" if value else "0") for value, text in axis.ticks()]
    return Axis(origin, origin + max(seconds, 1.0)), marks


def steps_axis(points: Iterable[Point]) -> tuple[Axis, Marks]:
    """The scale of steps, and its marks: whole numbers."""
    xs = [point[0] for point in points]
    low, high = min(xs, default=0.0), max(xs, default=1.0)
    axis = Axis(0.0 if low < 0.05 * high else low, max(high, low + 1))
    return axis, [(value, number(value)) for value, _ in axis.ticks() if value == int(value)]


# --- lanes and bars


def lane(spans: Iterable[Sequence[Any]], axis: Axis, seconds: Mapping[str, float], label: str) -> Markup:
    """What an attempt did, over time. ``seconds``: of each category, for the tooltips."""
    boxes: dict[str, list[str]] = {}
    for begin, until, category, share in _together(spans, (axis.high - axis.low) / _LANE_PARTS):
        left, right = round(_WIDTH * axis.at(begin)), round(_WIDTH * axis.at(until))
        top = round(_LANE_UNITS * (1 - share))
        boxes.setdefault(category, []).append(f"M{left} {top}h{max(right - left, 4)}V{_LANE_UNITS}H{left}z")
    drawn = [
        tag(
            "path",
            tag("title", f"{CATEGORIES.get(category, category)}: {duration(seconds.get(category, 0.0))}"),
            class_=f"f-{GROUP_OF.get(category, 'down')}",
            d="".join(parts),
        )
        for category, parts in boxes.items()
    ]
    picture = tag("svg", *drawn, height=_LANE, viewBox=f"0 0 {_WIDTH} {_LANE_UNITS}", preserveAspectRatio="none")
    track = tag("rect", class_="track", width="100%", height=_LANE, rx=2)
    return tag("svg", track, picture, height=_LANE, role="img", aria_label=label)


def shares_height(spans: Iterable[Sequence[Any]], axis: Axis) -> bool:
    """Whether a part of the lane is drawn lower than the others."""
    return any(share < 1 for *_, share in _together(spans, (axis.high - axis.low) / _LANE_PARTS))


def _together(spans: Iterable[Sequence[Any]], short: float) -> Iterable[tuple[float, float, str, float]]:
    """The spans, each with how much of the lane's height it takes. Training and waiting for a straggler alternate in
    each step: such spans shorter than ``short`` share their time, the wait below, as high as its part of it."""
    ordered = [(begin, until, category) for begin, until, category in spans]
    for mixed, group in groupby(ordered, key=lambda one: one[2] in _MIXED and one[1] - one[0] < short):
        own = list(group)
        if not mixed or len(own) == 1:
            yield from ((*one, 1.0) for one in own)
            continue
        waited = sum(until - begin for begin, until, category in own if category == _MIXED[1])
        begin, until = own[0][0], own[-1][1]
        yield begin, until, _MIXED[0], 1.0
        yield begin, until, _MIXED[1], waited / sum(end - start for start, end, _ in own)


def ruler(marks: Marks, axis: Axis) -> Markup:
    """The time axis below the lanes."""
    places = [_percent(axis.at(value)) for value, _ in marks]
    lines = [tag("line", class_="grid", x1=place, x2=place, y1=0, y2=5) for place in places]
    return tag("svg", *lines, *_below(marks, axis, 17), height=20, aria_hidden="true")


def bar(begin: float, end: float, group: str, label: str) -> Markup:
    """A part of a bar, which is 1 long."""
    box = tag("rect", class_=f"f-{group}", x=_percent(begin), width=_percent(max(end - begin, 0.002)), height=_LANE)
    track = tag("rect", class_="track", width="100%", height=_LANE, rx=2)
    return tag("svg", track, box, height=_LANE, role="img", aria_label=label)


# --- curves


@dataclass(frozen=True)
class Curve:
    """A line of a chart, with gaps between its pieces. ``colour``: a name of ``theme.GROUPS``. ``faint``: steps that no
    longer count."""

    pieces: Sequence[Sequence[Point]]
    colour: str
    title: str
    faint: bool = False
    dots: bool = False
    """Whether each point is a dot."""

    @property
    def points(self) -> Sequence[Point]:
        """The points of all pieces."""
        return [point for piece in self.pieces for point in piece]


def figure(words: str, curves: Sequence[Curve], x_axis: Axis, x_marks: Marks, label: str, edges: Marks = ()) -> Markup:
    """A chart with its caption. ``edges``: dotted lines with their tooltips."""
    y_axis = axis_of(value for curve in curves for point in curve.points for value in point[2:])
    scale = ", logarithmic scale" if y_axis.logarithmic else ""
    return tag("figure", tag("figcaption", words + scale), chart(curves, x_axis, x_marks, y_axis, label, edges))


def chart(curves: Sequence[Curve], x_axis: Axis, x_marks: Marks, y_axis: Axis, label: str, edges: Marks = ()) -> Markup:
    """Curves over steps, or dots over a parameter."""
    dotted = [
        tag("path", tag("title", text), class_="edge", d=f"M{round(_WIDTH * x_axis.at(value))} 0v{_HEIGHT}")
        for value, text in edges
    ]
    drawn = [part for curve in curves if curve.points for part in _drawn(curve, x_axis, y_axis)]
    box = {"viewBox": f"0 0 {_WIDTH} {_HEIGHT}", "preserveAspectRatio": "none"}
    picture = tag("svg", *dotted, *drawn, y=_ABOVE, height=_PLOT, **box)
    places = [(_down(y_axis, value), text) for value, text in y_axis.ticks(4)]
    lines = [tag("line", class_="grid", x1=0, x2="100%", y1=y, y2=y) for y, _ in places]
    texts = [tag("text", text, x=-6, y=y + 4, text_anchor="end") for y, text in places]
    below = _below(x_marks, x_axis, _ABOVE + _PLOT + _BELOW - 5)
    height = _ABOVE + _PLOT + _BELOW
    return tag("svg", *lines, picture, *texts, *below, height=height, role="img", aria_label=label, class_="plot")


def _drawn(curve: Curve, x_axis: Axis, y_axis: Axis) -> Iterable[Markup]:
    """A curve's band, if its points are several values each, and its line."""

    def places(piece: Sequence[Point], column: int) -> list[tuple[int, int]]:
        return [
            (round(_WIDTH * x_axis.at(point[0])), round(_HEIGHT * (1 - y_axis.at(point[column])))) for point in piece
        ]

    pieces = [piece for piece in curve.pieces if piece]
    if not curve.faint and any(point[2] != point[3] for point in curve.points):
        outlines = (f"{_path([*places(piece, 3), *reversed(places(piece, 2))])}z" for piece in pieces)
        yield tag("path", class_=f"band f-{curve.colour}", d="".join(outlines))
    line = "".join(_path(places(piece, 1)) for piece in pieces)
    kind = " faint" if curve.faint else ""
    kind += " dots" if curve.dots or len(curve.points) == 1 else ""  # one such as an evaluation behind the loop
    yield tag("path", tag("title", curve.title), class_=f"curve s-{curve.colour}{kind}", d=line)


def _path(points: Sequence[tuple[int, int]]) -> str:
    """A line through the points, or a dot for a single one."""
    (x, y), rest = points[0], points[1:]
    if not rest:
        return f"M{x} {y}h0"
    moves = (f"{b[0] - a[0]}{b[1] - a[1]:+d}" for a, b in pairwise(points))
    return f"M{x} {y}l{' '.join(moves)}"


def _down(axis: Axis, value: float) -> float:
    """Pixels from the top of a chart."""
    return round(_ABOVE + _PLOT * (1 - axis.at(value)), 1)


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def _below(marks: Marks, axis: Axis, y: int) -> Iterable[Markup]:
    """The texts below a time axis or a plot, each below its mark, and inside of the drawing at both ends."""
    for value, text in marks:
        share = axis.at(value)
        anchor = "start" if share < 0.06 else "end" if share > 0.94 else "middle"
        yield tag("text", text, x=_percent(share), y=y, text_anchor=anchor)
