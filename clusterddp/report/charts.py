"""Charts as inline SVG: lanes of a timeline, bars, curves. Pure functions from numbers to markup.

A drawing stretches to the width of its page: lines are in a picture that is scaled in one direction, while their width
and all texts keep their size. A chart is therefore readable on a phone and on paper, without any script.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from clusterddp.report.booking import CATEGORIES
from clusterddp.report.curves import Point, thinned
from clusterddp.report.theme import GROUP_OF, Axis, Markup, axis_of, number, tag
from clusterddp.reporter import duration

#: The units of a drawing: its width, and the height of curves.
WIDTH, _HEIGHT = 2000, 1000
#: Heights in pixels: of a lane, of a plot, and of the texts above and below it.
_LANE, _PLOT, _ABOVE, _BELOW = 12, 150, 14, 20
#: Units of a lane's height, and the part of its width below which alternating categories are drawn together.
_UNITS, _LANE_PARTS = 100, 40
_MIXED = ("training", "straggler")
#: The maximum number of pieces of a curve.
_PIECES = 100


@dataclass(frozen=True)
class Curve:
    """A line of a chart, with gaps between its pieces. ``colour``: a name of ``theme.SERIES``. ``faint``: steps that no
    longer count."""

    pieces: Sequence[Sequence[Point]]
    colour: str
    title: str
    faint: bool = False
    band: bool = True
    """Whether the values between the least and the largest of each point are shaded."""
    from_zero: bool = False
    """Whether the scale of the values begins at 0."""
    kind: str = ""
    """Dots instead of a line ("dots"), or a line behind the others ("back")."""
    run: int | None = None
    """Its run, among several. An entry in the legend shows only that run's curves."""

    @property
    def points(self) -> Sequence[Point]:
        """The points of all pieces."""
        return [point for piece in self.pieces for point in piece]

    def fitted(self, most: float) -> list[list[Point]]:
        """The pieces, with about ``most`` points together. Very many points are joined, or cut if they are faint."""
        whole, pieces = self.points, [piece for piece in self.pieces if piece]
        if len(pieces) > _PIECES:
            pieces = pieces[-_PIECES:] if self.faint else [whole]
        return [thinned(piece, max(2, round(most * len(piece) / len(whole)))) for piece in pieces]


# --- time


def lane(spans: Iterable[Sequence[Any]], axis: Axis, seconds: Mapping[str, float], label: str) -> Markup:
    """What an attempt did, over time. ``seconds``: of each category, for the tooltips."""
    boxes: dict[str, list[str]] = {}
    for begin, until, category, share in _together(spans, (axis.high - axis.low) / _LANE_PARTS):
        left, right, top = round(WIDTH * axis.at(begin)), round(WIDTH * axis.at(until)), round(_UNITS * (1 - share))
        boxes.setdefault(category, []).append(f"M{left} {top}h{max(right - left, 4)}V{_UNITS}H{left}z")
    drawn = [
        tag(
            "path",
            tag("title", f"{CATEGORIES.get(category, category)}: {duration(seconds.get(category, 0.0))}"),
            class_=f"f-{GROUP_OF.get(category, 'down')}",
            d="".join(parts),
        )
        for category, parts in boxes.items()
    ]
    picture = tag("svg", *drawn, height=_LANE, viewBox=f"0 0 {WIDTH} {_UNITS}", preserveAspectRatio="none")
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


def zoomable(drawn: Iterable[Markup], axis: Axis, origin: float, label: str, class_: str | None = None) -> Markup:
    """Lanes with their ruler, which are zoomed together. ``origin``: where the time begins to count."""
    data = {"data_axis": axis.name, "data_from": axis.low - origin, "data_to": axis.high - origin}
    return tag("div", *drawn, role="group", aria_label=label, class_=class_, **data)


def marks(found: Iterable[tuple[float, str]], axis: Axis, y: int) -> Markup:
    """The texts below a time axis or a plot."""
    return tag("g", *(_text(text, axis.at(value), y) for value, text in found), class_="x")


def ruler(found: Sequence[tuple[float, str]], axis: Axis) -> Markup:
    """The time axis below the lanes."""
    lines = [
        tag("line", class_="grid", x1=_percent(axis.at(value)), x2=_percent(axis.at(value)), y1=0, y2=5)
        for value, _ in found
    ]
    return tag("svg", *lines, marks(found, axis, 17), height=20, aria_hidden="true")


def bar(parts: Iterable[tuple[float, float, str]], label: str) -> Markup:
    """Parts ``(begin, end, group)`` of a bar, which is 1 long."""
    boxes = [
        tag("rect", class_=f"f-{group}", x=_percent(begin), width=_percent(max(end - begin, 0.002)), height=_LANE)
        for begin, end, group in parts
    ]
    track = tag("rect", class_="track", width="100%", height=_LANE, rx=2)
    return tag("svg", track, *boxes, height=_LANE, role="img", aria_label=label)


# --- curves


def chart(
    curves: Sequence[Curve],
    x_axis: Axis,
    x_marks: Sequence[tuple[float, str]],
    label: str,
    most: int,
    edges: Sequence[tuple[float, str]] = (),
) -> Markup:
    """Curves over steps or over time. ``most``: points of all of them. ``edges``: dotted lines with their tooltips."""
    shown, y_axis = _fitted(curves, most)
    y_marks = y_axis.ticks(4)
    dotted = [
        tag("path", tag("title", text), class_="edge", d=f"M{round(WIDTH * x_axis.at(value))} 0v{_HEIGHT}")
        for value, text in edges
    ]
    drawn = [part for curve, pieces in shown for part in _drawn(curve, pieces, x_axis, y_axis)]
    box = {"viewBox": f"0 0 {WIDTH} {_HEIGHT}", "preserveAspectRatio": "none"}
    picture = tag("svg", *dotted, *drawn, y=_ABOVE, height=_PLOT, **box)
    lines = [
        tag("line", class_="grid", x1=0, x2="100%", y1=_down(y_axis, value), y2=_down(y_axis, value))
        for value, _ in y_marks
    ]
    texts = [tag("text", text, x=-6, y=_down(y_axis, value) + 4, text_anchor="end") for value, text in y_marks]
    below = marks(x_marks, x_axis, _ABOVE + _PLOT + _BELOW - 5)
    height = _ABOVE + _PLOT + _BELOW
    zooms = {"data_axis": x_axis.name, "data_from": x_axis.low, "data_to": x_axis.high} if x_axis.name else {}
    data = zooms | {"data_low": y_axis.low, "data_high": y_axis.high, "data_log": "" if y_axis.logarithmic else None}
    parts = (tag("g", *lines, class_="rules"), picture, tag("g", *texts, class_="y"), below)
    return tag("svg", *parts, height=height, role="img", aria_label=label, **data)


def is_logarithmic(curves: Sequence[Curve], most: int) -> bool:
    """Whether ``chart`` gives these curves a logarithmic scale."""
    return _fitted(curves, most)[1].logarithmic


def _fitted(curves: Sequence[Curve], most: int) -> tuple[list[tuple[Curve, list[list[Point]]]], Axis]:
    """The pieces of each curve to draw, and the scale of their values."""
    total = sum(len(curve.points) for curve in curves) or 1
    shown = [(curve, curve.fitted(most * len(curve.points) / total)) for curve in curves if curve.points]
    points = [(curve, point) for curve, pieces in shown for piece in pieces for point in piece]
    return shown, axis_of(value for curve, point in points for value in _extent(curve, point))


def _extent(curve: Curve, point: Point) -> Sequence[float]:
    least = (0.0,) if curve.from_zero else ()
    return (*least, point[2], point[3]) if curve.band else (*least, point[1])


def _drawn(curve: Curve, pieces: Sequence[Sequence[Point]], x_axis: Axis, y_axis: Axis) -> Iterable[Markup]:
    """A curve's band, if its points are several values each, and its line."""

    def places(piece: Sequence[Point], column: int) -> list[tuple[int, int]]:
        return [
            (round(WIDTH * x_axis.at(point[0])), round(_HEIGHT * (1 - y_axis.at(point[column])))) for point in piece
        ]

    if curve.band and not curve.faint and any(point[2] != point[3] for piece in pieces for point in piece):
        outlines = (f"{_path([*places(piece, 3), *reversed(places(piece, 2))])}z" for piece in pieces)
        yield tag("path", class_=f"band f-{curve.colour}", d="".join(outlines))
    line = "".join(_path(places(piece, 1)) for piece in pieces)
    kind = " faint" if curve.faint else f" {curve.kind}" if curve.kind else ""
    kind += " dots" if len(curve.points) == 1 and not curve.kind else ""  # such as an evaluation behind the loop
    yield tag("path", tag("title", curve.title), class_=f"curve s-{curve.colour}{kind}", data_run=curve.run, d=line)


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


def _text(text: str, share: float, y: int) -> Markup:
    """A text below its mark, and inside the chart at both ends."""
    anchor = "start" if share < 0.06 else "end" if share > 0.94 else "middle"
    return tag("text", text, x=_percent(share), y=y, text_anchor=anchor)


def steps_axis(curves: Iterable[Curve]) -> tuple[Axis, list[tuple[float, str]]]:
    """The scale of steps, and its marks: whole numbers."""
    xs = [point[0] for curve in curves for point in curve.points]
    low, high = min(xs, default=0.0), max(xs, default=1.0)
    axis = Axis(0.0 if low < 0.05 * high else low, max(high, low + 1), name="steps")
    return axis, [(value, number(value)) for value, _ in axis.ticks() if value == int(value)]
