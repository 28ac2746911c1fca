"""The progress of a run, from the end of metrics.jsonl: its newest step and metrics, and its speed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from clusterddp.reporter import duration, speed, value_text
from clusterddp.rundir import json_lines, metrics_lines, schemas

_RECENT_BYTES = 1 << 14
#: The most metrics lines that a speed is taken from, and the most metrics that are named.
SAMPLES, MOST_METRICS = 12, 3


def main_metric(values: Mapping[str, Any]) -> str | None:
    """The metric that is shown if none is named: ``loss``, else one with that in its name, else the first."""
    names = [name for name in values if name not in schemas.NOT_METRICS]
    losses = [name for name in names if "loss" in name.lower()]
    return "loss" if "loss" in names else next(iter([*losses, *names]), None)


@dataclass(frozen=True)
class Recent:
    """``done``: steps. ``values``: the metrics of the newest step that logged any."""

    attempt: int
    done: int
    values: Mapping[str, Any]
    seconds_per_step: float | None

    def line(self, steps: int | None) -> str:
        """``step 1200/5000, 2.1 steps/s, 30 min left, loss 0.412``. ``steps``: of the whole run."""
        parts = [f"step {self.done}{'' if steps is None else f'/{steps}'}"]
        if rate := speed(self.seconds_per_step):
            parts.append(f"{rate.removesuffix('/s')} steps/s" if rate.endswith("/s") else rate)
        if self.seconds_per_step and steps is not None:
            parts.append(f"{duration(max(0, steps - self.done) * self.seconds_per_step)} left")
        main = main_metric(self.values)
        names = [main, *(name for name in self.values if name != main)] if main else []
        return ", ".join([*parts, *(f"{name} {value_text(self.values[name])}" for name in names[:MOST_METRICS])])


def recent(path: Path) -> Recent | None:
    """The values at the end of metrics.jsonl. None if there is no line yet, or it cannot be read."""
    try:
        texts = json_lines.last_lines(path, _RECENT_BYTES)
    except OSError:
        return None
    texts.reverse()
    lines = (line for text in texts if (line := json_lines.parse(text, schemas.METRICS)[0]) is not None)
    newest = next(lines, None)
    if newest is None:
        return None
    values = _metrics(newest) or next((found for line in lines if (found := _metrics(line))), {})
    sample = json_lines.parsed(texts[:: len(texts) // SAMPLES + 1], schemas.METRICS)
    seconds = pace([line for line, _ in sample if line is not None])
    return Recent(newest["attempt"], newest["step"] + 1, values, seconds)


def pace(newest_first: Sequence[Mapping[str, Any]]) -> float | None:
    """The median of the seconds per step between metrics lines of one attempt, on which few pauses have no effect."""
    own = [line for line in newest_first if line["attempt"] == newest_first[0]["attempt"] and has_time(line)]
    paces = [(b["time"] - a["time"]) / (b["step"] - a["step"]) for b, a in pairwise(own) if b["step"] > a["step"]]
    return statistics.median(paces) if paces and statistics.median(paces) > 0 else None


def has_time(line: Mapping[str, Any]) -> bool:
    """Whether a line has the time of its step."""
    return schemas.is_time(line.get("time"))


def _metrics(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics_lines.with_floats(line).items() if name not in schemas.NOT_METRICS}
