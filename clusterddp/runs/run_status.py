"""The state of a run, as words and as JSON: from its files and, if it answers, the Slurm controller.

The JSON is what ``list --json`` and ``status --json`` print. docs/reference/run.schema.json describes it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from clusterddp.events import how_it_ended, is_unconfirmed
from clusterddp.failures import exclusion
from clusterddp.jobdef import code_snapshot
from clusterddp.jobdef.load import load_resolved
from clusterddp.report import efficiency
from clusterddp.report.booking import Booking, Wait, book_run
from clusterddp.report.efficiency import Spent, advice, spent
from clusterddp.report.stragglers import scores, waits
from clusterddp.rundir.files import finite
from clusterddp.rundir.records import NOT_METRICS, is_count, is_time
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.summary import Summary, best_saved, summarize
from clusterddp.rundir.timing import TimedInterval, read_timings
from clusterddp.slurm.pace import PacedQueue
from clusterddp.slurm.run_states import OVER, RunState, run_states
from clusterddp.supervisor.limits import attempts_made

#: Seconds for which to retry a controller that does not answer.
PATIENCE_S = 20.0
Event = Mapping[str, Any]


def state_of(run: RunDirectory) -> tuple[str, str]:
    """The state in a word of ``run_states.WORDS``, and in a sentence."""
    summary, state = looked_at(run)
    return state.word, state_sentence(summary, state)


def looked_at(
    run: RunDirectory, metrics: Sequence[str] = (), queue: PacedQueue | None = None
) -> tuple[Summary, RunState]:
    """The run, and its state. ``queue``: of a view that is refreshed."""
    summary = summarize(run, metrics)
    return summary, run_states([summary], PATIENCE_S, queue=queue)[0]


def full_report(run: RunDirectory) -> dict[str, Any]:
    """The keys of every run, and those that need the whole history or the job definition."""
    job, events, now = load_resolved(run.job_file), run.events(), time.time()
    summary, state = looked_at(run)
    booking, made = booked(summary, state, events, now)
    intervals = intervals_of(run)
    return report(summary, state) | {
        "attempts": attempts_made(events),
        "job_name": job.name,
        "shape": job.shape,
        "code": code_of(run, events),
        "best": best_saved(events),
        "gpus_per_node": job.gpus_per_node if job.device == "cuda" else 0,
        "gpu_type": job.gpu_type,
        "excluded": exclusion.left_out(events, now),
        "cost": _cost(booking, made, events),
        "time": made
        and {
            "total_s": made.total_s,
            "seconds": made.seconds,
            "ettr": made.ettr,
            "goodput": made.goodput,
            "repeated_steps": made.repeated,
            "idle_node_s": made.idle_node_s,
            "provisional": made.provisional,
        },
        "advice": advice(job, booking, events, intervals),
        "stragglers": (found := scores(intervals)) and found.as_json(),
        "gpus": efficiency.newest_gpu_rows(intervals),
    }


def _cost(booking: Booking, made: Spent | None, events: Sequence[Event]) -> dict[str, Any] | None:
    """The keys that version 1 of the schema has besides ``time``."""
    if made is None or not attempts_made(events):
        return None
    first = next((one.begin for one in booking.intervals if one.attempt is not None), booking.intervals[-1].end)
    in_loop = ("training", "evaluating", "saving", "repeating", "straggler")
    return {
        "repeated_steps": made.repeated,
        "training_s": sum(made.seconds[name] for name in in_loop),
        "total_s": booking.intervals[-1].end - first,
    }


# --- the lines of the text


def code_of(run: RunDirectory, events: Sequence[dict[str, Any]]) -> str | None:
    return code_snapshot.described(code_snapshot.current(run), events)


def state_sentence(summary: Summary, state: RunState) -> str:
    """The state in a sentence, with the job or process that holds the run, or how to continue it."""
    if summary.outcome is not None:
        return how_it_ended(summary.outcome)
    if state.word == "failed":
        return f"failed: {state.reason}. Fix it, then continue with: clusterddp submit --run-dir {summary.run.quoted}"
    if state.word in OVER:
        return state.reason
    if state.word == "unknown":
        return f"unknown: {state.reason}"
    if state.word == "stopped":
        how = "--local --run-dir" if summary.run.loop_file.exists() else "--run-dir"
        ended = f" ({state.reason})" if state.reason else ""
        return f"stopped{ended}. Continue with: clusterddp submit {how} {summary.run.quoted}"
    if state.job is None:
        return state.reason
    return f"job {state.job_id} ({state.job.state}{f' on {state.nodes}' if state.nodes else ''})"


def intervals_of(run: RunDirectory) -> tuple[TimedInterval, ...]:
    """The step times of a run."""
    try:
        return read_timings(run).intervals
    except OSError:  # another user's
        return ()


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
        "confirmed": None if state.word != "completed" else not is_unconfirmed(summary.outcome or {"state": None}),
        "remedy": state.remedy,
        "expected_start": state.job.start if waits and state.job else None,
        "job_id": state.job_id,
        "nodes": state.nodes,
        "local": summary.local,
        "step": summary.step,
        "steps": summary.steps,
        "steps_made": summary.made,
        "steps_per_second": 1 / summary.seconds_per_step if summary.seconds_per_step else None,
        "left_s": left_s(summary, state),
        "attempts": summary.attempts,
        "ends": list(summary.ends),
        "metrics": finite(values(summary)),
        "saved": _saved(summary.saved),
        "started": summary.started,
        "updated": summary.updated,
    }


def booked(
    summary: Summary, state: RunState, events: Sequence[Mapping[str, Any]], now: float
) -> tuple[Booking, Spent | None]:
    """Where the run's time went, with ratios."""
    booking = book_run(summary, state, events, now, _waits(summary.run))
    return booking, spent(booking, events)


def _waits(run: RunDirectory) -> tuple[Wait, ...]:
    """Seconds that ranks waited for stragglers. Cached until there is more to read."""
    try:
        return _waits_of(run.path, run.timing_file.stat().st_size)
    except OSError:  # not timed, or another user's
        return ()


@lru_cache(maxsize=100)
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


def _saved(event: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if event is None or not is_count(event.get("step")):
        return None
    return {name: event[name] for name in ("step", "attempt", "time")}
