"""What all benchmarks share: the command line, rows of the common table, and the files in benchmarks/results/.

A row is a figure of ours, its limit, their ratio with its 95% interval, and the bar. A limit is what the machine, or
the least program that does the job, takes for the same, measured side by side in the same run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.markdown import table

RESULTS = Path("benchmarks/results")
RESAMPLES = 10_000
#: The 97.5% quantiles of Student's t, by the number of values.
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}


@dataclass(frozen=True)
class Found:
    """What was measured: rows of the common table, raw figures, and tables of what has no limit, by heading.

    ``where``: what the figures depend on besides the machine, such as Slurm's version.
    """

    figures: Mapping[str, Any]
    rows: Sequence[Row | Mapping[str, Any]] = ()
    where: str = ""
    tables: Mapping[str, str] = field(default_factory=dict)


def main(
    name: str,
    doc: str | None,
    text: str,
    measure: Callable[..., Found],
    quick: str,
    **more: Mapping[str, Any],
) -> None:
    """A benchmark's command line.

    ``measure`` gets ``quick`` (a short form, which leaves out what the words say) and what ``more`` adds: options by
    name, as argparse takes them. ``text``: a title, and what is measured in one or two sentences.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the files (%(default)s)")
    for option, how in more.items():
        parser.add_argument(f"--{option}", **how)
    options = vars(parser.parse_args())
    write(options.pop("out"), name, text, measure(**options))


def write(folder: Path, name: str, text: str, found: Found) -> None:
    """``NAME.md`` and ``NAME.json`` in ``folder``; the tables go to the terminal, too."""
    rows = [row if isinstance(row, Mapping) else asdict(row) for row in found.rows]
    parts = [text.strip(), place(found.where), *([row_table(rows)] if rows else [])]
    parts += [f"## {heading}\n\n{table}" for heading, table in found.tables.items()]
    written = "\n\n".join([*parts, f"Raw figures: [{name}.json]({name}.json).\n"])
    folder.mkdir(parents=True, exist_ok=True)
    taken = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "commit": commit(), "where": found.where}
    (folder / f"{name}.json").write_text(json.dumps({**taken, "rows": rows, **found.figures}, indent=1) + "\n")
    (folder / f"{name}.md").write_text(written)
    print(f"{written}\nwritten to {folder / name}.md and .json", flush=True)


# ---- figures


def median(values: Sequence[float]) -> float:
    """NaN of none, so that a table with a gap can still be written."""
    return statistics.median(values) if values else float("nan")


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The median and the largest."""
    return f"{median(values):.{digits}f} / {max(values):.{digits}f}" if values else "-"


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """A 95% interval of the median: the same figures for the same values.

    The percentile bootstrap, but Student's t of fewer than six values. No bootstrap is wider than from the smallest to
    the largest value, and of two, the median lies between them in only 50% of all cases, of five in 94%. Infinite of
    one value.
    """
    if len(values) < 2:
        return -math.inf, math.inf
    if len(values) in STUDENT:
        middle = statistics.fmean(values)
        half = STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
        return middle - half, middle + half
    draw = random.Random(0)
    return interval([median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES)])


# ---- rows


@dataclass(frozen=True)
class Row:
    """Of the table. ``allowed`` bounds the ratio; None is no bar.

    ``met`` is None without a bar, and where the interval holds it, so that more repetitions are needed to tell. The
    interval of a ratio that was measured once is infinite.
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
        numbers = (self.ours, self.limit, self.ratio)
        if not all(map(math.isfinite, numbers)) or math.isnan(self.low) or math.isnan(self.high):
            raise ValueError(f"row {self.row!r}: ours, limit and ratio must be finite, not {numbers}")


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
    low, high = median_interval(ratios)
    least = median(limit)
    if more is not None or most is not None:
        allowed = (least + more if more is not None else most or 0.0) / least
    found = (median(ratios), low, high)
    return Row(row, unit, median(ours), least, limit_is, *found, allowed, within(allowed, low, high))


def unpaired(row: str, unit: str, ours: Sequence[float], limit: Sequence[float], limit_is: str) -> Row:
    """The ratio of the medians of two series that alternated but belong together in no other way."""
    middle = (median(ours), median(limit))
    draw = random.Random(0)
    low, high = interval(
        [median(draw.choices(ours, k=len(ours))) / median(draw.choices(limit, k=len(limit))) for _ in range(RESAMPLES)]
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


def row_table(rows: Sequence[Row | Mapping[str, Any]]) -> str:
    """The rows in Markdown, failed ones included."""
    return table(HEAD, [cells(row if isinstance(row, Mapping) else asdict(row)) for row in rows])


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


# ---- when, where and on what


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def commit() -> str:
    """The commit of this work tree."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    found = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    return found or "unknown"


def place(more: str = "") -> str:
    """When and where something was measured, and in which load: a sentence."""
    has, load = machine(), os.getloadavg()[0]
    kind = f"{has['cores']} cores ({has['cpu']}), Linux {has['kernel']}, Python {has['python']}, torch {has['torch']}"
    words = [kind, *filter(None, [more]), f"load average {load:.1f}, commit {commit()}"]
    return f"Measured on {time.strftime('%Y-%m-%d')} on {', '.join(words)}."


def named(what: str, text: str, known: Iterable[str]) -> list[str]:
    """The names in a comma-separated list; exits with an error if one is unknown."""
    names, known = text.split(","), list(known)
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"no {what} {', '.join(unknown)}; available: {', '.join(known)}")
    return names


def say(words: str) -> None:
    """What is measured now."""
    print(f"{time.strftime('%H:%M:%S')} {words}", file=sys.stderr, flush=True)
