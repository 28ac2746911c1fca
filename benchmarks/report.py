"""What all benchmarks share: medians, intervals, Markdown tables, and the report files in docs/measurements/."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any


def median(values: Sequence[float]) -> float:
    """NaN of none, so that a table with a gap can still be written."""
    return statistics.median(values) if values else float("nan")


def worst(values: Sequence[float]) -> float:
    """The largest; NaN of none."""
    return max(values, default=float("nan"))


def bootstrap_interval(
    values: Sequence[float],
    of: Callable[[Sequence[float]], float] = median,
    *,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> tuple[float, float]:
    """The percentile bootstrap interval of a statistic: the same figures for the same values and seed."""
    generator = random.Random(seed)
    found = sorted(of(generator.choices(values, k=len(values))) for _ in range(resamples))
    tail = (1 - level) / 2
    return found[int(tail * resamples)], found[min(resamples - 1, int((1 - tail) * resamples))]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; floats get two decimals."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    model = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "cpu": model[0] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def place(more: str = "") -> str:
    """Where and when something was measured, of which commit, and in which load: a sentence for the top of a page."""
    has, load = machine(), os.getloadavg()[0]
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    kind = f"{has['cores']} cores ({has['cpu']}), Linux {has['kernel']}, Python {has['python']}, torch {has['torch']}"
    when = f"{time.strftime('%Y-%m-%d')}, commit {commit or 'unknown'}, load average {load:.1f} at the end"
    return f"Measured on one machine: {kind}{', ' + more if more else ''}; {when}."


def named(what: str, text: str, known: Iterable[str]) -> list[str]:
    """The names in a comma-separated list; exits with an error if one is unknown."""
    names, known = text.split(","), list(known)
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"no {what} {', '.join(unknown)}; available: {', '.join(known)}")
    return names


def parser(words: str | None, quick: str) -> argparse.ArgumentParser:
    """A benchmark's command line: ``--quick``, with what it leaves out, and the folder that ``write`` takes."""
    made = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help=quick)
    made.add_argument("--out", type=Path, default=Path("docs/measurements"), help="folder of the files (%(default)s)")
    made.add_argument("--note", default="", help="a sentence about this measurement, for the top of the page")
    return made


def say(words: str) -> None:
    """What is measured now."""
    print(f"{time.strftime('%H:%M:%S')} {words}", file=sys.stderr, flush=True)


NOTES = "\n## Notes\n"
"""From this heading on a page is written by hand, and kept when it is measured again."""


def write(
    folder: Path,
    name: str,
    text: str,
    figures: Mapping[str, Any],
    *,
    where: str = "",
    tables: Mapping[str, str] | None = None,
) -> None:
    """``NAME.md`` and ``NAME.json`` in ``folder``; the page goes to the terminal, too.

    The page: ``text``, a title and a sentence; the place, with ``where``; the rows of ``figures``; other tables, each
    below its heading. Where the page with all figures is, it is written again.
    """
    from benchmarks import page, rows  # which import this module

    parts = [text, place(where)]
    parts += [rows.table(figures["rows"])] if figures.get("rows") else []
    parts += [f"## {heading}\n\n{table}" for heading, table in (tables or {}).items()]
    written = "\n\n".join([*parts, f"Raw figures: [{name}.json]({name}.json).\n"])
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.md"
    _, heading, notes = file.read_text().partition(NOTES) if file.exists() else ("", "", "")
    (folder / f"{name}.json").write_text(json.dumps({"machine": machine(), **figures}, indent=1) + "\n")
    file.write_text(written + heading + notes)
    print(f"{written}\nwritten to {file} and .json", flush=True)
    if (folder / "README.md").exists():
        page.write(folder)
