"""Rows of the common table: a figure of ours, its limit, their ratio with its 95% interval, and the bar.

A limit is what the machine, or the least program that does the job, takes for the same, measured side by side in the
same run. Every benchmark's JSON file has its rows under ``rows``; ``python -m benchmarks`` gathers them.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import report

RESAMPLES = 10_000


@dataclass(frozen=True)
class Row:
    """Of the table. ``allowed`` bounds the ratio; None is no bar.

    ``met`` is None without a bar, and where the interval holds it, so that more repetitions are needed to tell.
    """

    row: str
    unit: str
    ours: float
    limit: float
    limit_is: str
    ratio: float
    low: float
    high: float
    allowed: float | None = None
    met: bool | None = None

    def __post_init__(self) -> None:
        numbers = (self.ours, self.limit, self.ratio, self.low, self.high)
        if not all(map(math.isfinite, numbers)):
            raise ValueError(f"row {self.row!r}: ours, limit, ratio, low and high must be finite, not {numbers}")

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def paired(
    row: str,
    unit: str,
    ours: Sequence[float],
    limit: Sequence[float],
    limit_is: str,
    *,
    allowed: float | None = None,
    more: float | None = None,
    most: float | None = None,
) -> Row:
    """The median ratio of pairs that were measured next to each other.

    The bar: at most ``allowed`` times the limit, or ``more`` above it, or ``most`` (both in the row's unit).
    """
    ratios = [one / other for one, other in zip(ours, limit, strict=True)]
    low, high = report.bootstrap_interval(ratios)
    least = report.median(limit)
    if more is not None or most is not None:
        allowed = (least + more if more is not None else most or 0.0) / least
    found = (report.median(ratios), low, high)
    return Row(row, unit, report.median(ours), least, limit_is, *found, allowed, within(allowed, low, high))


def unpaired(row: str, unit: str, ours: Sequence[float], limit: Sequence[float], limit_is: str) -> Row:
    """The ratio of the medians of two series that alternated but belong together in no other way."""
    middle = (report.median(ours), report.median(limit))
    draw = random.Random(0)
    low, high = interval(
        [
            report.median(draw.choices(ours, k=len(ours))) / report.median(draw.choices(limit, k=len(limit)))
            for _ in range(RESAMPLES)
        ]
    )
    return Row(row, unit, *middle, limit_is, middle[0] / middle[1], low, high)


def counted(row: str, unit: str, ours: float, limit: float, limit_is: str, *, allowed: float | None = None) -> Row:
    """Of figures that are the same in each run, such as bytes or instructions."""
    ratio = ours / limit
    return Row(row, unit, ours, limit, limit_is, ratio, ratio, ratio, allowed, within(allowed, ratio, ratio))


def interval(resampled: Sequence[float]) -> tuple[float, float]:
    """The middle 95% of the values of resamples."""
    found = sorted(resampled)
    return found[int(0.025 * len(found))], found[int(0.975 * len(found))]


def within(allowed: float | None, low: float, high: float) -> bool | None:
    """Whether a bar is met by an interval; None if that cannot be told."""
    if allowed is None or low <= allowed < high:
        return None
    return high <= allowed


def failed(benchmark: str, reason: str) -> dict[str, Any]:
    """In place of the rows of a benchmark that gave none."""
    return {"benchmark": benchmark, "row": benchmark, "failed": reason}


def read(file: Path) -> list[dict[str, Any]]:
    """The rows of a benchmark's JSON file; an empty list if it has none."""
    return list(json.loads(file.read_text()).get("rows", []))


HEAD = ["row", "ours", "limit", "ratio (95% interval)", "bar", "met"]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows in Markdown, failed ones included."""
    return report.table(HEAD, [cells(row) for row in rows])


def cells(row: Mapping[str, Any]) -> list[str]:
    """A line of the table."""
    if "failed" in row:
        return [row["row"], f"**failed: {' '.join(row['failed'].split()).replace('|', '/')}**", "-", "-", "-", "-"]
    interval = f"{number(row['ratio'])} ({number(row['low'])} to {number(row['high'])})"
    bar = "-" if row["allowed"] is None else f"at most {number(row['allowed'])}"
    met = "-" if row["allowed"] is None else {True: "yes", False: "**no**", None: "cannot tell"}[row["met"]]
    ours, limit = (f"{number(row[name])} {row['unit']}".rstrip() for name in ("ours", "limit"))
    return [row["row"], ours, f"{limit} ({row['limit_is']})", interval, bar, met]


def number(value: float) -> str:
    """Three digits, and no exponent: 0.0123, 1.02, 35.1, 1240."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f}"
