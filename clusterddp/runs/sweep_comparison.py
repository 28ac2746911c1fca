"""Compares the members of a sweep at the same step, and finds the best one."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from clusterddp.errors import UsageError
from clusterddp.jobdef.job import best_metric
from clusterddp.rundir.records import NOT_METRICS
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.summary import Summary
from clusterddp.runs.sweep_folder import Record, read_record
from clusterddp.runs.sweep_members import keys_of, short_keys
from clusterddp.slurm.run_states import RunState

Found: TypeAlias = "tuple[Summary, RunState]"
#: States of members that train, or continue once they can.
_UNDER_WAY = ("running", "held", "pending")


@dataclass(frozen=True)
class Comparison:
    """``values``: those of the members, by key (``lr=``, unlike a metric) and run directory. ``steps``: after how many
    steps the metrics are compared. None: each member's newest, because none is under way."""

    values: Mapping[str, Mapping[Path, str]]
    steps: int | None
    members: Sequence[Found]

    @property
    def sentence(self) -> str:
        """Which metrics are compared, for the user."""
        if self.steps is None:
            return "Metrics: the newest values of each member"
        return f"Metrics after {self.steps} steps, which all members in progress have reached"


def compare(members: Sequence[Found], metrics: Collection[str]) -> Comparison | None:
    """The members with their metrics at equal steps, or None unless all are members of one sweep."""
    folders = {summary.run.path.parent for summary, _ in members if summary.sweep is not None}
    if len(folders) != 1 or any(summary.sweep is None for summary, _ in members):
        return None
    record = read_record(*folders)
    if record is None:
        return None
    steps = common_steps(members)
    if steps is not None:
        members = [
            (replace(summary, metrics=metrics_after(summary.run, steps, metrics)) if metrics else summary, state)
            for summary, state in members
        ]
    return Comparison(_by_key(record, [summary.run for summary, _ in members]), steps, members)


def common_steps(members: Sequence[Found]) -> int | None:
    """The most steps that all members under way have done. None if none is. A member that waits for its first attempt
    does not count."""
    done = [summary.step for summary, state in members if state.word in _UNDER_WAY and summary.step is not None]
    return min(done, default=None)


def metrics_after(run: RunDirectory, steps: int, names: Collection[str]) -> dict[str, Any]:
    """The newest values of these metrics after this many steps, as a metrics line."""
    found: dict[str, Any] = {}
    for line in reversed(run.logged()):
        if line["step"] < steps:
            found = {**{name: value for name, value in line.items() if not found or name in names}, **found}
            if all(name in found for name in names):
                break
    return found


def _by_key(record: Record, runs: Sequence[RunDirectory]) -> dict[str, dict[Path, str]]:
    known = {**record.left, **record.members}
    return {
        f"{name}=": {run.path: known[run.path.name][key] for run in runs if key in known.get(run.path.name, {})}
        for key, name in short_keys(keys_of(known.values())).items()
    }


# --- the best


@dataclass(frozen=True)
class Best:
    """The member with the best value of a metric."""

    run: RunDirectory
    metric: str
    value: float
    smallest: bool

    @property
    def sentence(self) -> str:
        """Its name, and the command that exports its newest model."""
        order = "smallest" if self.smallest else "largest"
        return f"{order} {self.metric}: {self.value:.6g}, {self.run.path.name}"


def metric_of(text: str) -> tuple[str, bool]:
    """The metric in ``accuracy``, ``accuracy max`` or ``loss min``, and whether its smallest value is best."""
    if (found := best_metric(text)) is None:
        raise UsageError(f"--best {text}: expected the name of a metric, optionally with max or min, such as 'f1 max'")
    return found


def best(members: Sequence[Found], text: str) -> Best:
    """The best member, among those that completed or are under way. Raises UsageError if none has logged the metric."""
    metric, smallest = metric_of(text)
    ranked: list[tuple[float, RunDirectory]] = []
    for summary, state in members:
        value = summary.metrics.get(metric)
        if state.word in ("completed", *_UNDER_WAY) and _is_number(value):
            ranked.append((float(value or 0), summary.run))
    if not ranked:
        names = sorted({name for summary, _ in members for name in summary.metrics} - NOT_METRICS)
        raise UsageError(f"--best {text}: no member has logged {metric}. Logged: {', '.join(names) or 'nothing'}")
    value, run = (min if smallest else max)(ranked, key=lambda pair: pair[0])
    return Best(run, metric, value, smallest)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and not math.isnan(value)
