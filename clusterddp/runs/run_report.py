"""A run as JSON, without its job definition: what ``list --json`` prints, and docs/reference/run.schema.json describes.

``list`` loads no YAML reader, which takes longer than reading hundreds of runs. ``run_status.py`` adds what needs it.
"""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from clusterddp.history.checkpoints import Checkpoint
from clusterddp.history.view import RunView
from clusterddp.report.booking import Booking, Wait, book_run
from clusterddp.report.efficiency import Spent, spent
from clusterddp.report.stragglers import waits
from clusterddp.rundir.files import finite
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.schemas import NOT_METRICS, is_time
from clusterddp.rundir.summary import Summary
from clusterddp.rundir.timing import read_timings
from clusterddp.slurm.run_states import RunState

#: The version of the schema. It changes when a key is removed or changes its meaning, not with a new key.
SCHEMA = 1
#: A run without a step for this many seconds, and for the time of this many steps, has no estimate of its time left.
_STALLED_S, _STALLED_STEPS = 60.0, 10


def report(summary: Summary, state: RunState) -> dict[str, Any]:
    """The keys that every run has. Times are unix seconds."""
    waits = state.word in ("pending", "held") and state.job is not None
    return {
        "schema": SCHEMA,
        "run": str(summary.run.path),
        "name": summary.name,
        "sweep": summary.sweep,
        "state": state.word,
        "reason": state.reason,
        "confirmed": None if state.word != "completed" else summary.outcome is None or not summary.outcome.unconfirmed,
        "remedy": state.remedy,
        "expected_start": state.job.start if waits and state.job else None,
        "job_id": state.job_id,
        "nodes": state.nodes,
        "local": summary.local,
        "step": summary.step,
        "steps": summary.steps,
        "steps_made": summary.made,
        "steps_repeated": summary.redone,
        "steps_per_second": 1 / summary.seconds_per_step if summary.seconds_per_step else None,
        "left_s": left_s(summary, state),
        "attempts": summary.attempts,
        "ends": list(summary.ends),
        "metrics": finite(values(summary)),
        "saved": _saved(summary.saved),
        "started": summary.started,
        "updated": summary.updated,
    }


def booked(summary: Summary, state: RunState, history: RunView, now: float) -> tuple[Booking, Spent | None]:
    """Where the run's time went, with ratios."""
    booking = book_run(summary, state, history, now, _waits(summary.run))
    return booking, spent(booking, history)


def _waits(run: RunDirectory) -> tuple[Wait, ...]:
    """Seconds that ranks waited for stragglers. Cached until there is more to read."""
    try:
        return _waits_of(run.path, run.timing_file.stat().st_size)
    except OSError:  # not timed, or another user's
        return ()


@lru_cache(maxsize=1)
def _waits_of(run: Path, _size: int) -> tuple[Wait, ...]:
    return tuple(waits(read_timings(RunDirectory(run)).intervals))


def left_s(summary: Summary, state: RunState) -> float | None:
    """Seconds of training left. None unless the run is training and makes steps."""
    return summary.left_s if state.word == "running" and stalled_s(summary, state) is None else None


def stalled_s(summary: Summary, state: RunState) -> float | None:
    """Seconds for which a training run has made no step, if that is longer than usual.

    It may hang, restart, evaluate or save, so its past speed does not predict its end.
    """
    at = summary.metrics.get("time")
    if at is None or state.word != "running" or not summary.seconds_per_step or not is_time(at):
        return None
    age = time.time() - float(at)
    return age if age > max(_STALLED_S, _STALLED_STEPS * summary.seconds_per_step) else None


def moment(seconds: float) -> str:
    """``11-23 08:00:00``, in local time, with the year unless it is the current one."""
    at = time.localtime(seconds)
    return time.strftime("%m-%d %H:%M:%S" if at.tm_year == time.localtime().tm_year else "%Y-%m-%d %H:%M:%S", at)


def values(summary: Summary) -> dict[str, Any]:
    """The newest metrics alone."""
    return {name: value for name, value in summary.metrics.items() if name not in NOT_METRICS}


def _saved(event: Checkpoint | None) -> dict[str, Any] | None:
    return None if event is None else {"step": event.step, "attempt": event.attempt, "time": event.time}
