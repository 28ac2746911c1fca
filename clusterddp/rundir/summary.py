"""A run in short for ``list`` and ``status``, from at most five of its files, of which only the ends are read.

A damaged or unreadable file leaves its part empty, so that one run does not hide the others. The state of a run that is
not over comes from ``slurm/run_states.py``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from clusterddp.errors import RunDirectoryError
from clusterddp.history.beginnings import (
    Beginning,
    Forked,
    NotRead,
    OwnCheckpointRead,
    Resumed,
    Started,
    Submitted,
    Training,
)
from clusterddp.history.checkpoints import Checkpoint
from clusterddp.history.codec import decode
from clusterddp.history.ends import Cancelled, Continues, Failed, Resubmitted, Stopped
from clusterddp.history.event import Event
from clusterddp.history.outcome import Outcome
from clusterddp.history.steps import Progress, Result, StepsSeen
from clusterddp.history.view import AttemptView, RunView
from clusterddp.history.words import ATTEMPT_ENDS, BY_SLURM
from clusterddp.rundir import json_lines, metrics_lines, schemas
from clusterddp.rundir.claims import Claim, JobClaim, ProcessClaim, is_job_id, read_claim, waiting_claim
from clusterddp.rundir.files import names_in, status
from clusterddp.rundir.progress import SAMPLES, has_time, pace
from clusterddp.rundir.run_directory import SWEEP_FILE, RunDirectory
from clusterddp.rundir.timing import newest_interval

_T = TypeVar("_T")
_E = TypeVar("_E", bound=Event)

#: Bytes read at each end of the history, and at the end of the metrics.
_EVENTS_BYTES, _METRICS_BYTES = 1 << 15, 1 << 14
#: Bytes at the end of the metrics that are searched for a metric that the newest line lacks.
_WANTED_BYTES = 1 << 18
#: Keys of a line or an event that are not metrics.
_EVENT_NAME = re.compile(rb'"event": ?"(\w+)"')
#: The events that are read. The others may be many; of the checkpoints, only the newest is read.
_KINDS = (Forked, Submitted, Started, Progress, NotRead, OwnCheckpointRead, StepsSeen, Training, Resumed)
_READ = frozenset((*(kind.name for kind in _KINDS), *ATTEMPT_ENDS))


@dataclass(frozen=True)
class Summary:
    """A run in short. Times are unix seconds."""

    run: RunDirectory
    name: str
    """The folder's name; of a member of a sweep, with that of the sweep."""
    sweep: str | None = None
    """The name of the sweep that the run belongs to."""
    outcome: Outcome | None = None
    """How the run ended, None until then."""
    cancelled: bool = False
    """Whether ``clusterddp cancel`` was called."""
    step: int | None = None
    """The number of steps done; None if none is recorded."""
    steps: int | None = None
    """The number of steps of the whole run; None if unknown."""
    attempts: int = 0
    """How many attempts started their ranks."""
    ends: tuple[str, ...] = ()
    """Why attempts ended, oldest first; of a very long history, the newest."""
    cause: str | None = None
    """Why the last of these attempts was stopped: the value of a ``run_states.Cause``. None if the run is over."""
    stopped: bool = False
    """Whether the newest attempt has recorded that the run waits for its user, and why."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """The newest metrics line that counts, with values that the script logged after its last step; empty if there is
    none."""
    saved: Checkpoint | None = None
    """The event of the newest checkpoint."""
    started: float = 0.0
    """When the run began: its first event, else its job.yaml."""
    updated: float = 0.0
    """When the run recorded its last event or step."""
    job_id: str | None = None
    """The newest job, also of a run that is over; None if the run had none."""
    local: bool = False
    """Whether processes of a machine train the run, without Slurm."""
    nodes: str = ""
    """The nodes of the newest attempt."""
    seconds_per_step: float | None = None
    """The median over the newest attempt's last steps; None if unknown."""
    made: int | None = None
    """How many steps the newest attempt has made, at least, where only that is known: of scripts that do not use
    clusterddp."""
    redone: int | None = None
    """How many steps the newest attempt repeated, at least, because the script did not read its own checkpoint; None if
    it did."""
    claims: tuple[Claim, ...] = ()
    """Who may train the run, the newest claim first (``rundir/claims.py``); empty if it is free. The loop of a local
    run also holds it between two attempts."""
    released: JobClaim | None = None
    """The claim of the job that has released the run last, unless the run has been claimed since. It may still submit
    the next job."""
    begun: bool = False
    """Whether the newest job has started an attempt already."""
    readable: bool = True
    """Whether the claims could be read, which only the owner may."""
    error: str | None = None
    """Why a record of the run cannot be read."""

    @property
    def left_s(self) -> float | None:
        """Seconds of training that are left. None if unknown."""
        if self.seconds_per_step is None or self.step is None or self.steps is None:
            return None
        return max(0, self.steps - self.step) * self.seconds_per_step


def summarize(run: RunDirectory, wanted: Collection[str] = ()) -> Summary:
    """Reads a run's summary. ``wanted``: metrics whose newest values may also be in earlier lines."""
    names = _names_in(run.path) or []
    problems: list[str] = []
    outcome = _tried(run.outcome, problems) if "outcome.json" in names else None
    history = _History(run)
    metrics, seconds = _metrics(run, history, wanted)
    step = _step(outcome, metrics, history)
    made, seconds = _made(run, history) if step is None else (None, seconds)
    found, readable, unread = _claims(run) if outcome is None else ((), True, ())
    problems += unread
    claims = tuple(claim for claim in found if not claim.let_go)
    released = next((claim for claim in found if isinstance(claim, JobClaim)), None) if not claims else None
    newest = claims[0] if claims else None
    newest_job = newest.job if isinstance(newest, JobClaim) else None
    in_sweep = os.path.lexists(f"{run.path.parent}/{SWEEP_FILE}")
    return Summary(
        run=run,
        name=f"{run.path.parent.name}/{run.path.name}" if in_sweep else run.path.name,
        sweep=run.path.parent.name if in_sweep else None,
        outcome=outcome,
        cancelled="cancelled" in names,
        step=step,
        steps=history.steps,
        attempts=history.attempts,
        ends=history.ends,
        cause=history.cause,
        stopped=history.stopped,
        metrics=metrics,
        saved=history.saved,
        started=history.first_time or _changed(run.job_file),
        updated=max(history.last_time, metrics["time"] if has_time(metrics) else 0.0) or _changed(run.job_file),
        job_id=newest_job or history.job_id,
        local=history.local if newest is None else isinstance(newest, ProcessClaim),
        nodes=history.nodes,
        seconds_per_step=seconds,
        made=made,
        redone=history.redone,
        claims=claims if readable else history.claims(),
        released=released,
        begun=newest_job is not None and newest_job == history.started_job,
        readable=readable,
        error=problems[0] if problems else None,
    )


class _History:
    """The entries at both ends of events.jsonl."""

    def __init__(self, run: RunDirectory) -> None:
        try:
            beginning, end = json_lines.both_ends(run.events_file, _EVENTS_BYTES)
        except OSError:  # another user's
            beginning, end = [], []
        named = _named(end)
        late = [*_events(named)]
        events = RunView([*_events(_named(beginning)), *late], partial=bool(beginning))
        self.attempts = events.attempts_made
        self.begun = {event.attempt: event.step for event in events.all(Beginning)}
        ends = [event for event in late if isinstance(event, (Continues, Failed, Cancelled))]
        self.ends = tuple(event.reason for event in ends)
        self.cause = ends[-1].cause if ends and isinstance(ends[-1], Continues) else None
        newest = RunView(late)
        last = newest.with_ranks[-1].last(Stopped) if newest.with_ranks else None
        self.stopped = last is not None and last.then != BY_SLURM
        self.saved = _last(named, Checkpoint)
        self.result = _last(named, Result)
        self.first_time = next((event.time for event in events), 0.0)
        late += [self.saved] if self.saved else []
        self.last_time = max((event.time for event in late), default=0.0)
        progress = events.last(Progress)
        self.steps = None if progress is None else progress.steps
        steps = [event.at_step for event in sorted(late, key=lambda event: event.time) if event.at_step is not None]
        self.step = steps[-1] if steps else None
        started = events.last(Started)
        self.newest_attempt = 0 if started is None else started.attempt
        own = newest.attempt(self.newest_attempt)
        self.redone = _redone(own)
        self.made = 1 if own.has(StepsSeen) else None
        self.nodes = "" if started is None else started.nodes
        self.local = started is not None and started.job is None
        self.started_job = None if started is None else started.job
        jobs = [event.job for event in events if isinstance(event, (Submitted, Started, Resubmitted))]
        self.job_id = next((job for job in reversed(jobs) if is_job_id(job)), None)

    def claims(self) -> tuple[Claim, ...]:
        """The claim of the newest job, where the claims themselves cannot be read."""
        return (JobClaim(self.job_id),) if self.job_id else ()


def _redone(own: AttemptView) -> int | None:
    """What an attempt repeats whose script did not read its checkpoint: by the numbers that it prints, if it does."""
    if own.unread is None:
        return None
    numbered = own.first(Beginning)
    redone = own.unread.redone if numbered is None or numbered.redone is None else numbered.redone
    return redone or 0


def _named(lines: Iterable[bytes]) -> list[tuple[str, bytes]]:
    """The lines, each with its event."""
    return [(name[1].decode(), line) for line in lines if (name := _EVENT_NAME.search(line))]


def _events(lines: Iterable[tuple[str, bytes]]) -> Iterator[Event]:
    """The events that a summary needs. Most lines of a long history are not parsed."""
    for event, _ in json_lines.parsed((line for name, line in lines if name in _READ), schemas.EVENT):
        if event is not None:
            yield decode(event)


def _last(lines: Sequence[tuple[str, bytes]], kind: type[_E]) -> _E | None:
    """The newest event of a class."""
    line = next((line for name, line in reversed(lines) if name == kind.name), b"")
    found, _ = json_lines.parse(line, schemas.EVENT)
    event = None if found is None else decode(found)
    return event if isinstance(event, kind) else None


def _metrics(run: RunDirectory, history: _History, wanted: Collection[str]) -> tuple[dict[str, Any], float | None]:
    """The newest metrics that count, and the seconds per step at the end of the newest attempt.

    A line counts unless a later attempt began at its step or before.
    """
    try:
        lines = json_lines.last_lines(run.metrics_file, _WANTED_BYTES if wanted else _METRICS_BYTES)
    except OSError:  # another user's
        return {}, None
    lines.reverse()
    counts = metrics_lines.counts(history.begun)

    def newest(lines: Iterable[bytes]) -> dict[str, Any]:
        parsed = (json_lines.parse(line, schemas.METRICS)[0] for line in lines)
        return next((metrics_lines.with_floats(line) for line in parsed if line is not None and counts(line)), {})

    found = newest(lines)
    for name in wanted:  # not every step logs every metric
        if found and name not in found:
            quoted = json.dumps(name).encode()
            earlier = newest(line for line in lines if quoted in line)
            found |= {key: value for key, value in earlier.items() if key == name}
    sample = json_lines.parsed(lines[:: len(lines) // SAMPLES + 1], schemas.METRICS)
    return found | _outside(history.result, found, counts), pace([line for line, _ in sample if line is not None])


def _outside(
    result: Result | None, newest: Mapping[str, Any], counts: Callable[[Mapping[str, Any]], bool]
) -> dict[str, Any]:
    """What the script logged outside a step, after the newest step that counts."""
    line = _result_line(result) if result else None
    if line is None or not counts(line) or (has_time(newest) and line["time"] < newest["time"]):
        return {}
    return {name: value for name, value in metrics_lines.with_floats(line).items() if name not in schemas.NOT_METRICS}


def _result_line(event: Result) -> dict[str, Any]:
    """What the script logged outside a step, such as an evaluation behind the loop, as a metrics line."""
    values = {name: value for name, value in event.others.items() if name not in schemas.NOT_VALUES}
    return {"step": event.step, "time": event.time, "attempt": event.attempt, **values}


def _step(outcome: Outcome | None, metrics: Mapping[str, Any], history: _History) -> int | None:
    """The number of steps done: metrics number them from 0, events and outcome count them."""
    if outcome is not None and outcome.step is not None:
        return outcome.step
    return metrics["step"] + 1 if "step" in metrics else history.step


def _made(run: RunDirectory, history: _History) -> tuple[int | None, float | None]:
    """The steps of the newest attempt whose numbers are unknown, and the seconds per step in the newest interval."""
    try:
        newest = newest_interval(run)
    except OSError:  # another user's
        newest = None
    if newest is None or newest.made is None or newest.attempt < history.newest_attempt:
        return history.made, None
    steps = max(made or 0 for made in newest.steps)
    return newest.made, (newest.end - newest.begin) / steps if steps else None


def _claims(run: RunDirectory) -> tuple[tuple[Claim, ...], bool, Sequence[str]]:
    """Who may train the run or has released it, the newest claim first, whether that could be read, and which records
    are damaged."""
    names = _names_in(run.private)
    if names is None:
        return (), False, ()
    problems: list[str] = []
    numbers = sorted((int(name[8:]) for name in names if re.fullmatch(r"attempt-\d{1,18}", name)), reverse=True)
    found: list[Claim] = []
    seen: list[int] = []
    for number in numbers[:2]:  # one that is just being claimed has no record yet
        holder: Claim | None = _tried(partial(read_claim, run.holder_file(number), run), problems)
        if holder is not None:
            found, seen = [holder], [number]
            break
    if "submitted.json" in names:
        waiting: Claim | None = _tried(partial(waiting_claim, run, seen), problems)
        found = [waiting, *found] if waiting is not None else found
    if "loop.json" in names and not any(isinstance(claim, JobClaim) for claim in found):
        loop = _tried(partial(read_claim, run.loop_file, run), problems)
        found += [replace(loop, loop=True)] if isinstance(loop, ProcessClaim) else []
    return tuple(found), True, problems


def _tried(read: Callable[[], _T], problems: list[str]) -> _T | None:
    """The result of ``read``. None, and a line in ``problems``, if a record is damaged or cannot be read."""
    try:
        return read()
    except (RunDirectoryError, OSError) as error:
        problems.append(str(error))
        return None


def _names_in(folder: Path) -> list[str] | None:
    """The names in a folder. None if they cannot be read."""
    try:
        return names_in(folder)
    except FileNotFoundError:
        return []
    except OSError:
        return None


def _changed(path: Path) -> float:
    with suppress(OSError):
        return status(path).st_mtime
    return 0.0


@dataclass(frozen=True)
class BestSaved:
    """The best checkpoint: its step, the metric by which it is the best, and the value of that metric."""

    step: int
    metric: str
    value: Any


def best_saved(history: RunView) -> BestSaved | None:
    """The best checkpoint of the history that counts. None if there is none."""
    counted: list[BestSaved] = []
    for event in history:
        if isinstance(event, Checkpoint) and event.best:
            metric, value = list(event.best.items())[-1]
            counted.append(BestSaved(event.step, metric, value))
        elif isinstance(event, Beginning):
            while counted and counted[-1].step > event.step:
                counted.pop()
    return counted[-1] if counted else None
