"""What all benchmarks share: the command line, medians and intervals, tables, and the files in benchmarks/results/."""

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
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.rows import Row

RESULTS = Path("benchmarks/results")


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
    from benchmarks import page, rows  # which import this module

    table = [row if isinstance(row, Mapping) else row.as_json() for row in found.rows]
    parts = [text.strip(), place(found.where), *([rows.table(table)] if table else [])]
    parts += [f"## {heading}\n\n{table}" for heading, table in found.tables.items()]
    written = "\n\n".join([*parts, f"Raw figures: [{name}.json]({name}.json).\n"])
    folder.mkdir(parents=True, exist_ok=True)
    taken = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "commit": commit(), "where": found.where}
    (folder / f"{name}.json").write_text(json.dumps({**taken, "rows": table, **found.figures}, indent=1) + "\n")
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


# ---- figures


def median(values: Sequence[float]) -> float:
    """NaN of none, so that a table with a gap can still be written."""
    return statistics.median(values) if values else float("nan")


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The median and the largest."""
    return f"{median(values):.{digits}f} / {max(values):.{digits}f}" if values else "-"


def bootstrap_interval(values: Sequence[float], resamples: int = 10_000) -> tuple[float, float]:
    """The 95% percentile bootstrap interval of the median: the same figures for the same values."""
    draw = random.Random(0)
    found = sorted(median(draw.choices(values, k=len(values))) for _ in range(resamples))
    return found[int(0.025 * resamples)], found[min(resamples - 1, int(0.975 * resamples))]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; floats get two decimals."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


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
