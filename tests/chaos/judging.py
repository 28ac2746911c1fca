"""Whether the invariants hold over what a run left behind."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterddp.rundir.json_lines import read_lines
from clusterddp.rundir.run_directory import RunDirectory
from tests.chaos.behaviours import SECRET, STEPS, Behaviour
from tests.runs_on_disk import outcome_of
from tests.soak.judging import Injected, steps_that_count, terminal_events, unannounced_redone
from tests.waiting import differing, final_state

#: Steps from one checkpoint to the next, and those that may be made while one is being written.
EVERY, SAVING = 10, 10
#: The events that end an attempt and not the run, each as what it says of its cause.
ENDS = {"requeued": "preemption", "resubmitted": "preemption", "restarted": "kill", "stopped": "kill"}
#: The longest history of such a run, in bytes; without the metrics.
LONGEST = 2**20


def problems(
    run: RunDirectory, habit: Behaviour, reference: RunDirectory | None, killed: int | None = None
) -> list[str]:
    """What is wrong with a run that is over.

    ``reference``: the undisturbed training's, None for that one itself. ``killed``: the attempt that lost a rank.
    """
    try:
        events, lines = run.events(), list(read_lines(run.metrics_file))
        counted = run.metrics()
    except Exception as error:
        return [f"the history cannot be read: {error}"]
    found = [*_end(run, habit, events), *_attempts(events), *_lost(habit, killed, events, lines), *_records(run)]
    completed = (outcome_of(run) or {}).get("state") == "completed"
    found += steps_that_count(counted, STEPS if completed else len(counted))
    if completed and reference is not None:
        try:
            different = differing(final_state(run), final_state(reference))
        except Exception as error:
            return [*found, f"I5: the last checkpoint cannot be read: {error!r}"]
        found += [f"I3: not the undisturbed training's: {', '.join(different)}"] if different else []
    return found


def _end(run: RunDirectory, habit: Behaviour, events: Sequence[Mapping[str, Any]]) -> list[str]:
    """One outcome, and the one that this habit has; "completed" only where all steps are done."""
    outcome = outcome_of(run) or {}
    state, step, reason = outcome.get("state"), outcome.get("step"), outcome.get("reason", "")
    found = terminal_events(events)
    if state == "completed" and step != STEPS:
        found.append(f"completed at step {step} of {STEPS}")
    if state not in habit.ends.replace("refused", "failed").split(" or "):
        found.append(f"{state}, expected {habit.ends}: {reason[:300]}")
    elif state == "failed" and not re.search(habit.says, reason):
        found.append(f"the reason does not say {habit.says!r}: {reason[:300]}")
    return found


def _attempts(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """I6: every attempt but the last one has an event that ends it, with its reason."""
    ended = {event["attempt"] for event in events if event["event"] in ENDS and event.get("reason")}
    started = sorted(event["attempt"] for event in events if event["event"] == "started")
    return [f"I6: attempt {number} has no cause for its end" for number in started[:-1] if number not in ended]


def _lost(
    habit: Behaviour, killed: int | None, events: Sequence[dict[str, Any]], lines: Sequence[dict[str, Any]]
) -> list[str]:
    """I4: no step is repeated after a notice, and no more than a snapshot's interval without.

    A notice may come while an attempt ends by the kill, or after a rank has left its loop: its steps are lost by that.
    """
    ending = {killed} | {event["attempt"] for event in events if event["event"] == "left_loop"}
    injected = [
        Injected("kill" if event["attempt"] in ending else ENDS[event["event"]], event["time"])
        for event in events
        if event["event"] in ENDS
    ]
    announced, most = unannounced_redone(injected, events, lines)
    found = []
    if announced > (0 if habit.hears_notice else EVERY + SAVING):
        found.append(f"I4: {announced} steps repeated after a preemption")
    if most > EVERY + SAVING:
        found.append(f"I4: {most} steps repeated after a kill, and a checkpoint is taken every {EVERY}")
    return found


def _records(run: RunDirectory) -> list[str]:
    """The history is small, holds no secret, and nothing of ours raised."""
    found = (
        [] if run.events_file.stat().st_size < LONGEST else [f"events.jsonl: {run.events_file.stat().st_size} bytes"]
    )
    texts = {path.name: _text(path) for path in (run.events_file, run.outcome_file, run.logs / "supervisor.log")}
    for name, text in texts.items():
        if re.search(r'File "[^"]*/clusterddp/(launch|__main__)', text):
            found.append(f"{name}: a traceback of the supervisor's")
        if any(part in text for part in (SECRET, repr(SECRET)[1:-1])):
            found.append(f"{name}: the password")
    return found


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
