"""The content of a report on one run, as plain data, read once from its files. ``clusterddp report --json`` prints it
as docs/reference/report.schema.json describes it.

If a file is damaged, missing or not the run's own, its part stays empty and a note explains why.
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from clusterddp.errors import ClusterddpError
from clusterddp.history.beginnings import Started
from clusterddp.history.checkpoints import Checkpoint, CheckpointDamaged, CheckpointFailed
from clusterddp.history.codec import decode, words_of
from clusterddp.history.event import name_of
from clusterddp.history.failures import Failure, LaunchFailed
from clusterddp.history.view import RunView
from clusterddp.jobdef import code_snapshot
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.load import load_resolved
from clusterddp.report.booking import Booking, book_run
from clusterddp.report.curves import Grid, Metrics, curves, incomplete, limits, read_metrics
from clusterddp.report.efficiency import advice, gpu_rows, spent
from clusterddp.report.stragglers import waits
from clusterddp.report.theme import clipped
from clusterddp.report.timeline import in_words, interruptions, lanes
from clusterddp.reporter import counted, duration
from clusterddp.rundir import json_lines, records, schemas
from clusterddp.rundir.files import finite
from clusterddp.rundir.progress import main_metric
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.summary import BestSaved, Summary, best_saved
from clusterddp.rundir.timing import Timings, read_timings
from clusterddp.slurm.run_states import OVER, RunState

_T = TypeVar("_T")

#: The version of the schema. It changes when a key is removed or changes its meaning, not with a new key.
SCHEMA = 1
#: The maximum number of events at the beginning and at the end of a history, failures, boxes and attempts.
_FIRST_EVENTS, _LAST_EVENTS, _FAILURES, _BOXES = 40, 160, 30, 5
#: The maximum number of characters of a sentence, of a box and of the job definition.
_SENTENCE, _BOX, _JOB = 600, 6_000, 20_000
#: Larger amounts are those of damaged lines.
_LARGEST = 1e18
#: The errors from a damaged or foreign record, with values of unexpected types.
_UNEXPECTED = (ClusterddpError, OSError, KeyError, TypeError, ValueError, AttributeError, ArithmeticError)


#: What is known of a first failure, in words.
Describe = Callable[[RunDirectory, Failure], str]


def collect(summary: Summary, state: RunState, describe: Describe, now: float) -> dict[str, Any]:
    """A run's data. ``summary`` and ``state``: what ``clusterddp list`` knows of it."""
    run, notes = summary.run, [summary.error] if summary.error else []
    job = _tried("job.yaml", lambda: load_resolved(run.job_file), notes)
    history = _events(run, notes)
    timings = _tried("timing.jsonl", lambda: read_timings(run), notes) or Timings()
    if timings.skipped:
        notes.append(f"{counted(timings.skipped, 'line')} of timing.jsonl skipped, because another program wrote them")
    if not timings.intervals and run.timing_file.exists():
        notes.append("timing.jsonl has no timed step")
    if timings.torn:
        notes.append(incomplete("timing.jsonl"))
    empty = Booking((), state.word not in OVER)
    booking = (
        _tried("the history", lambda: book_run(summary, state, history, now, waits(timings.intervals)), notes) or empty
    )
    found = _tried("the history", lambda: lanes(booking, history, state.word), notes) or []
    within = (booking.intervals[0].begin, booking.intervals[-1].end) if booking.intervals else None
    advised: list[str] = []
    if job:
        advised = _tried("the history", lambda: advice(job, booking, history, timings.intervals), notes) or []
    gpus = gpu_rows(timings.intervals)
    timings = Timings()  # to free them before the metrics are read
    metrics = read_metrics(run)
    counted_until = _tried("the attempts", lambda: limits(run, history, metrics), notes) or {}
    notes += metrics.notes
    notes += _absent(run, history, metrics, state)
    stops = interruptions(found)
    data = {
        "run": str(run),
        "name": summary.name,
        "sweep": summary.sweep,
        "state": state.word,
        "reason": clipped(state.reason, _SENTENCE),
        "step": summary.step,
        "steps": summary.steps,
        "steps_made": summary.made,
        "began": within[0] if within else summary.started,
        "ended": within[1] if within else None,
        "notes": notes,
        "time": _tried("the history", lambda: (made := spent(booking, history)) and made.as_json(), notes),
        "advice": advised,
        "attempts": found,
        "interruptions": stops,
        "metrics": _main_first(curves(metrics, counted_until), best_saved(history)),
        "gpus": gpus,
        "checkpoints": _checkpoints(history),
        "failures": _failures(run, history, describe, notes),
        "history": _history(history),
        "events": len(history),
        "job": _job(run, job, notes),
        "code": _code(run, history, notes),
        "commands": _commands(summary, state),
    }
    doubtful = summary.outcome is not None and summary.outcome.unconfirmed
    safe: dict[str, Any] = finite(data | {"verdict": _verdict(data, stops, doubtful)})
    return safe


def _tried(what: str, read: Callable[[], _T], notes: list[str]) -> _T | None:
    """The result of ``read``, or None and a note if a record is damaged or from another program."""
    try:
        return read()
    except _UNEXPECTED as error:
        text = str(error) if isinstance(error, (ClusterddpError, OSError)) else f"{type(error).__name__}: {error}"
        note = clipped(text if what in text else f"{what}: {text}", _SENTENCE)
        if not any(text in known for known in notes):
            notes.append(note)
        return None


# --- the history


def _events(run: RunDirectory, notes: list[str]) -> RunView:
    """All readable events. A note counts the others."""
    found = RunView()
    wrong, torn = 0, False
    try:
        with json_lines.open_lines(run.events_file) as file:
            lines = json_lines.WholeLines(file)
            for event, error in json_lines.parsed(lines, schemas.EVENT):
                wrong += error is not None
                if event is not None:
                    found.add(decode(event))
            torn = lines.torn
    except FileNotFoundError:
        pass
    except OSError as error:
        notes.append(f"could not read events.jsonl: {error.strerror}")
        return found
    if wrong:
        notes.append(f"{counted(wrong, 'line')} of events.jsonl skipped, because another program wrote them")
    if torn:
        notes.append(incomplete("events.jsonl"))
    return found


def _absent(run: RunDirectory, history: RunView, metrics: Metrics, state: RunState) -> list[str]:
    """Files that should be there. A run that waits for its first attempt has neither of them."""
    found = []
    if not history and (metrics.lines or state.word in OVER or run.newest_attempt() is not None):
        found.append("events.jsonl is missing, so the run has no history")
    if not metrics.lines and (history.has(Checkpoint) or (not history and found)):
        found.append("metrics.jsonl is missing, so no step is recorded")
    return found


def _main_first(found: list[dict[str, Any]], saved: BestSaved | None) -> list[dict[str, Any]]:
    """The metric by which the run is judged comes first: that of its best checkpoint, else the loss."""
    main = saved.metric if saved else main_metric({one["name"]: one for one in found})
    return sorted(found, key=lambda one: one["name"] != main)


def _history(history: RunView) -> list[dict[str, Any]]:
    """The events that have a sentence: of a long history, the first and the last."""
    found = []
    for event in history:
        words = words_of(event)
        if words is not None:
            line = {"time": event.time, "attempt": event.attempt, "event": name_of(event)}
            found.append({**line, "words": clipped(words, _SENTENCE)})
    return found if len(found) <= _FIRST_EVENTS + _LAST_EVENTS else [*found[:_FIRST_EVENTS], *found[-_LAST_EVENTS:]]


def _failures(run: RunDirectory, history: RunView, describe: Describe, notes: list[str]) -> list[dict[str, Any]]:
    """The newest first failures of attempts, oldest first, with a box for the last few."""
    failed = [event for event in history if isinstance(event, Failure)][-_FAILURES:]
    found = []
    for place, event in enumerate(failed):
        box = None
        if place >= len(failed) - _BOXES:
            box = _tried("the record of a failure", partial(describe, run, event), notes)
        found.append(
            {
                "time": event.time,
                "attempt": event.attempt,
                "rank": event.rank,
                "host": "" if isinstance(event, LaunchFailed) else event.host,
                "words": clipped(words_of(event) or event.name, _SENTENCE),
                "box": None if box is None else _end(box, _BOX),
            }
        )
    return found


def _end(text: str, most: int) -> str:
    """The first line and the end of a text, where a traceback names the error."""
    if len(text) <= most:
        return text
    first, _, rest = text.partition("\n")
    tail = rest[-most:].partition("\n")[2]
    return f"{first[:200]}\n...\n{tail}"


def _checkpoints(history: RunView) -> dict[str, Any]:
    """What saves cost, over steps. Sizes are bytes."""
    saved = history.all(Checkpoint)
    failed = len(history.all(CheckpointFailed)) + len(history.all(CheckpointDamaged))
    grid = Grid(event.step for event in saved)
    best = best_saved(history)
    found: dict[str, Any] = {"number": len(saved), "failed": failed, "newest": None, "best": best and asdict(best)}
    if saved:
        found["newest"] = {name: getattr(saved[-1], name) for name in ("step", "attempt", "time")}
    for name in ("blocked_s", "durable_s", "bytes"):
        known = sorted((event.step, amount) for event in saved if 0 <= (amount := getattr(event, name)) < _LARGEST)
        values = [float(value) for _, value in known]
        found[name] = None
        if values:
            found[name] = {
                "median": statistics.median(values),
                "most": max(values),
                "newest": values[-1],
                "points": grid.reduced([float(step) for step, _ in known], values),
            }
    return found


# --- the definition, the code, the commands


def _job(run: RunDirectory, job: Job | None, notes: list[str]) -> dict[str, Any]:
    text = _tried("job.yaml", lambda: records.read_record(run.job_file).decode(errors="replace"), notes)
    return {
        "name": job.name if job else None,
        "shape": job.shape if job else None,
        "text": None if text is None else clipped(text, _JOB),
    }


def _code(run: RunDirectory, history: RunView, notes: list[str]) -> dict[str, Any]:
    """The commit, the snapshot and the versions of the newest attempt."""
    started = history.last(Started)
    state = {} if started is None else started.code
    newest = {str(key)[:40]: clipped(value, 120) for key, value in list(state.items())[:12]}
    snapshot = _tried("the snapshot of the code", lambda: code_snapshot.current(run), notes)
    known = {name: text for name, text in newest.items() if text != "None"}
    return known | ({} if snapshot is None else {"snapshot": str(snapshot.folder(run))})


def _commands(summary: Summary, state: RunState) -> list[dict[str, str]]:
    """The commands to continue the run, to look at it, and to make the same run again."""
    run = shlex.quote(str(summary.run))
    local = "--local " if summary.local else ""
    found = []
    if state.word == "stopped":
        found.append(("continue the run", f"clusterddp submit {local}--run-dir {run}"))
    elif state.word in ("running", "pending", "held"):
        found.append(("follow the run", f"clusterddp status --watch {run}"))
    found.append(("show its history", f"clusterddp status {run}"))
    found.append(("show what the ranks printed", f"clusterddp logs {run}"))
    again = shlex.quote(str(summary.run.path.with_name(f"{summary.run.path.name}-again")))
    job = shlex.quote(str(summary.run.job_file))
    found.append(
        ("start the same run again with the current code", f"clusterddp submit {local}{job} --run-dir {again}")
    )
    return [{"what": what, "command": command} for what, command in found]


# --- the verdict


def _verdict(data: Mapping[str, Any], stops: Mapping[str, int], doubtful: bool) -> str:
    """One or two sentences on the run's progress, its interruptions and their cost.

    ``doubtful``: whether its completion is not confirmed.
    """
    step, steps, time = data["step"], data["steps"], data["time"]
    state, reason = data["state"], data["reason"]
    reached = "" if step is None else f" at step {step:,}"
    of = f" of {steps:,}" if step is not None and steps is not None and steps > step else ""
    told = (doubtful or state not in ("completed", "cancelled", "running")) and reason.strip() and reason != state
    reason = clipped(" ".join(reason.split()), 200).rstrip(".")
    why = f" {reason[:1].upper()}{reason[1:]}." if told else ""
    continued = " It does not continue until it is submitted again." if state == "stopped" else ""
    beginning = {
        "completed": f"Completed{f' all {step:,} steps' if step is not None else ''}",
        "failed": f"Failed{reached}{of}",
        "cancelled": f"Cancelled{reached}{of}",
        "running": f"Training{reached}{of}",
        "pending": f"Waiting in the queue{reached}{of}",
        "held": f"Held{reached}{of}",
        "stopped": f"Stopped{reached}{of}",
    }.get(state, f"State unknown{reached}{of}")
    if time is None:
        return f"{beginning}.{why}{continued}"
    since = "since" if time["provisional"] else "after"
    was = in_words(stops) or "not interrupted"
    repeated = time["repeated_steps"]
    lost = (
        f"{repeated:,} {'step was' if repeated == 1 else 'steps were'} repeated" if repeated else "no step was repeated"
    )
    lost = "how many steps were repeated is unknown" if repeated is None else lost
    share = f"{100 * time['ettr']:.0f}% was productive training"
    first = f"{beginning}, {duration(time['total_s'])} {since} its submission.{why}{continued}"
    return f"{first} It was {was}, {lost}, and {share}."
