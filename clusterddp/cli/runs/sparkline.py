"""A curve as one line of text: ``2.31 █▆▅▃▂▂▁ 0.412``. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from clusterddp.report.axes import axis_of

#: From low to high; the second for terminals without UTF-8.
_BLOCKS, _ASCII = "▁▂▃▄▅▆▇█", "_.-=+*#@"
#: Where the values are NaN or infinite.
_NOT_FINITE = "x"
#: Larger values are cut, so that differences between values stay finite.
_LARGEST = 1e300


def labelled(points: Sequence[tuple[int, float]], width: int, encoding: str = "utf-8") -> str:
    """The first value, the curve and the newest value, in ``width`` columns at most; empty without points."""
    if not points:
        return ""
    first, last = f"{points[0][1]:.4g}", f"{points[-1][1]:.4g}"
    room = width - len(first) - len(last) - 2
    if len(points) == 1 or room < 4:
        return last
    return f"{first} {sparkline(points, room, encoding)} {last}"


def sparkline(points: Sequence[tuple[int, float]], width: int, encoding: str = "utf-8") -> str:
    """A character per equal part of the steps, whose height is the part's mean; at most one per point.

    A part without points repeats the one before. The scale is logarithmic where the report's is.
    """
    means = _means(points, min(width, len(points)))
    axis = axis_of(mean for mean in means if math.isfinite(mean))
    levels = _BLOCKS if _takes_blocks(encoding) else _ASCII
    return "".join(
        levels[round(axis.at(mean) * (len(levels) - 1))] if math.isfinite(mean) else _NOT_FINITE for mean in means
    )


def _means(points: Sequence[tuple[int, float]], count: int) -> list[float]:
    if not points:
        return []
    begin, steps = points[0][0], points[-1][0] - points[0][0] + 1
    parts: list[list[float]] = [[] for _ in range(count)]
    for step, value in points:
        cut = max(-_LARGEST, min(value, _LARGEST)) if math.isfinite(value) else value
        parts[(step - begin) * count // steps].append(cut)
    means: list[float] = []
    for part in parts:
        finite = [value for value in part if math.isfinite(value)]
        means.append(math.fsum(finite) / len(finite) if finite else math.nan if part else means[-1])
    return means


def _takes_blocks(encoding: str) -> bool:
    try:
        _BLOCKS.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
