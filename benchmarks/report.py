"""What all benchmarks share: medians, intervals, Markdown tables, and the files in benchmarks/results/."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path("benchmarks/results")


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


def parser(words: str | None, quick: str) -> argparse.ArgumentParser:
    """A benchmark's command line: ``--quick``, with what it leaves out, and the folder that ``write`` takes."""
    made = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help=quick)
    made.add_argument("--out", type=Path, default=RESULTS, help="folder of the files (%(default)s)")
    return made


def say(words: str) -> None:
    """What is measured now."""
    print(f"{time.strftime('%H:%M:%S')} {words}", file=sys.stderr, flush=True)


def write(
    folder: Path,
    name: str,
    text: str,
    figures: Mapping[str, Any],
    *,
    where: str = "",
    tables: Mapping[str, str] | None = None,
) -> None:
    """``NAME.md`` and ``NAME.json`` in ``folder``; the tables go to the terminal, too.

    ``text``: a title, and what was measured in one or two sentences. ``figures`` may have ``rows``, which are the first
    table; ``tables`` follow, each below its heading.
    """
    from benchmarks import page, rows  # which import this module

    parts = [text.strip(), place(where)]
    parts += [rows.table(figures["rows"])] if figures.get("rows") else []
    parts += [f"## {heading}\n\n{table}" for heading, table in (tables or {}).items()]
    written = "\n\n".join([*parts, f"Raw figures: [{name}.json]({name}.json).\n"])
    folder.mkdir(parents=True, exist_ok=True)
    taken = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "commit": commit()}
    (folder / f"{name}.json").write_text(json.dumps({**taken, **figures}, indent=1) + "\n")
    (folder / f"{name}.md").write_text(written)
    print(f"{written}\nwritten to {folder / name}.md and .json", flush=True)
    if folder == RESULTS:
        page.write()


def fill(page: Path, tables: Mapping[str, str]) -> None:
    """Replaces tables of a page, each between ``<!-- NAME: its command -->`` and ``<!-- end of NAME -->``."""
    text = page.read_text()
    for name, table in tables.items():
        pattern = rf"(<!-- {re.escape(name)}: [^\n]* -->\n).*?(<!-- end of {re.escape(name)} -->)"
        text = re.sub(pattern, lambda found: f"{found[1]}\n{table}\n\n{found[2]}", text, flags=re.DOTALL)  # noqa: B023
    page.write_text(text)
