"""Scales of charts: where a value lies between 0 and 1, and which round numbers are written beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

#: A scale is logarithmic from this ratio of its largest to its smallest value on, if all are positive.
_LOGARITHMIC = 30.0
#: Units of time: the least seconds that they are used for, and the seconds of one.
_UNITS = (("s", 0.0, 1.0), ("min", 180.0, 60.0), ("h", 3 * 3600.0, 3600.0), ("d", 72 * 3600.0, 86400.0))


@dataclass(frozen=True)
class Axis:
    """``low`` and ``high``: the values at 0 and at 1. ``name``: charts with axes of one name are zoomed together."""

    low: float
    high: float
    logarithmic: bool = False
    name: str = ""

    def at(self, value: float) -> float:
        """Where a value lies, from 0 to 1; what is outside of the scale lies at its end."""
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
        step = round_step((self.high - self.low) / most)
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


def round_step(least: float) -> float:
    """The next of 1, 2, 5, 10, ... that is at least ``least``."""
    power = 10.0 ** math.floor(math.log10(max(least, 1e-300)))
    return next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= least * (1 - 1e-9))


def number(value: float) -> str:
    """A number as a person writes it: ``20,000``, ``0.25``, ``1e-7``."""
    if value == 0:
        return "0"
    size = abs(value)
    if 1e-3 <= size < 1e7:
        text = f"{value:,.4f}" if size < 1 else f"{value:,.2f}" if size < 1000 else f"{value:,.0f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit for so long a time, and its seconds."""
    found = [(name, size) for name, least, size in _UNITS if seconds >= least]
    return found[-1] if found else ("s", 1.0)


def time_axis(seconds: float, origin: float = 0.0) -> tuple[Axis, list[tuple[float, str]]]:
    """The scale of a duration, in seconds from ``origin``, and its marks with their unit."""
    name, size = time_unit(seconds)
    axis = Axis(0.0, max(seconds, 1.0) / size)
    marks = [(origin + value * size, f"{text} {name}" if value else "0") for value, text in axis.ticks()]
    return Axis(origin, origin + max(seconds, 1.0), name="time"), marks
