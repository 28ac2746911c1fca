"""Which of several runs is best, by the newest value of the metric by which most of them are judged. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

Run = Mapping[str, Any]
#: States of runs that are ranked, as in ``list --best``. The others ended early.
RANKED = ("completed", "running", "held", "pending")


def main_of(runs: Sequence[Run]) -> str | None:
    """The metric by which most runs are judged, or None if none was logged."""
    mains = Counter(run["metrics"][0]["name"] for run in runs if run["metrics"])
    return mains.most_common(1)[0][0] if mains else None


def newest(run: Run, name: str | None) -> Mapping[str, Any] | None:
    """The newest value of a metric, with its step, or None."""
    found: Mapping[str, Any] | None = next((one["last"] for one in run["metrics"] if one["name"] == name), None)
    return found


def ranked(runs: Sequence[Run], name: str | None) -> list[Run]:
    """The runs, best first, followed by those that failed or have no value, in their order."""
    own = [one["best"] for run in runs for one in run["metrics"] if one["name"] == name]
    smallest = any(best["smallest"] for best in own if best)

    def key(run: Run) -> tuple[bool, float]:
        value = newest(run, name) if run["state"] in RANKED else None
        return value is None, 0.0 if value is None else value["value"] if smallest else -value["value"]

    return sorted(runs, key=key)


def has_rank(run: Run, name: str | None) -> bool:
    """Whether a run is compared with the others."""
    return run["state"] in RANKED and newest(run, name) is not None


def label(run: Run) -> str:
    """The label that identifies a run: its parameters, or else its name."""
    return ", ".join(f"{key}={value}" for key, value in run["values"].items()) or str(run["name"])


def parameters(runs: Sequence[Run]) -> dict[str, list[str]]:
    """The keys of a sweep that have several values, with these in order: numbers, then texts."""
    found: dict[str, list[str]] = {}
    for key in dict.fromkeys(key for run in runs for key in run["values"]):
        values = {run["values"][key] for run in runs if key in run["values"]}
        if len(values) > 1:
            found[key] = sorted(values, key=_in_order)
    return found


def _in_order(text: str) -> tuple[bool, float, str]:
    try:
        value = float(text)
    except ValueError:
        return True, 0.0, text
    return False, value if value == value else 0.0, text
