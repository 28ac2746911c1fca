"""Where a run's time went: each second since its first submission is booked once. Pure functions of its history
and its step timings.

Its events ``phase`` show what rank 0 was doing, and ``allocated`` shows when a job waited. An attempt that ended
before these were recorded counts as launching, and all of its wait as queued.

Lost work has the category ``repeating``, booked while the steps are made again. After the first step of an attempt
(category ``first_step``), rank 0 reports the phase ``repeating`` if an earlier attempt got further, and ``training`` at
that attempt's last step (``Run._finish_step``). Saves and evaluations in between keep their categories. If steps have
no numbers, as in a script's own loop, the lost work itself is booked: the training from the time at which the file of
``own_resume`` was written until the next launch, or all of it until then if the script did not read that file. The
other costs of a failure are ``hung``, ``launching``, ``down``, ``queued`` and ``held``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from clusterddp.history.beginnings import (
    Allocated,
    Beginning,
    Forked,
    OwnResume,
    Phase,
    Resumed,
    Started,
    Submitted,
    Training,
)
from clusterddp.history.checkpoints import Checkpoint, CheckpointDamaged, CheckpointFailed
from clusterddp.history.ends import AttemptEnd, Requeued, Restarted, Resubmitted, RunEnd, Stopped
from clusterddp.history.event import Event
from clusterddp.history.failures import Hung, NodeLost, RankFailed, Suspended
from clusterddp.history.steps import Evaluated, Stalled, StepsSeen
from clusterddp.history.stops import Finishing, Stopping
from clusterddp.history.view import AttemptView, RunView
from clusterddp.history.words import BY_SLURM, PHASES, RUN_ENDS
from clusterddp.rundir.claims import JobClaim
from clusterddp.rundir.schemas import is_time
from clusterddp.rundir.summary import Summary
from clusterddp.slurm.run_states import RunState

#: The categories of a second, in the order of an attempt, with the words of ``status`` and of the report.
CATEGORIES: Mapping[str, str] = {
    "queued": "queued",
    "held": "held",
    "limited": "waiting for its turn in the sweep",
    "launching": "launching",
    "importing": "importing",
    "rendezvous": "rendezvous",
    "restoring": "restoring",
    "first_step": "first step",
    "training": "training",
    "saving": "blocked by a save",
    "evaluating": "evaluating",
    "repeating": "repeated steps",
    "straggler": "waiting for a straggler",
    "hung": "hung",
    "down": "down",
    "unknown": "unknown",
}
#: The other phases of rank 0 (``PHASES``) are categories themselves.
_OF_PHASE = {"after_loop": "unknown", "ending": "launching"}
#: The category after the end of a run's records, by its state (``slurm/run_states.py``), unless it is over.
_OF_STATE = {"pending": "queued", "held": "held", "limited": "limited", "running": "", "stopped": "down"}
#: The seconds to which heartbeats show when the last step before a hang ended. The metrics show it exactly.
BEAT_S = 2.0
#: Seconds for which Slurm holds a requeued job by default (AuthInfo=cred_expire, plus 1 s).
HOLD_S = 121.0
#: During these, evaluations and saves are possible.
_IN_LOOP = frozenset(("first_step", "training", "repeating"))
#: During these, the ranks may stall.
_IN_SCRIPT = _IN_LOOP | {"importing", "rendezvous", "restoring", "saving", "evaluating", "unknown"}


class Interval(NamedTuple):
    """``attempt`` is None before the first and between two attempts. Times are unix seconds."""

    begin: float
    end: float
    category: str
    attempt: int | None = None

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.begin


class Wait(NamedTuple):
    """From ``begin`` to ``end`` (unix seconds), the share of a step for which ranks waited for a straggler."""

    begin: float
    end: float
    share: float


@dataclass(frozen=True)
class Booking:
    """Intervals without gaps, oldest first. ``provisional``: the run is not over, and the last of them may change."""

    intervals: tuple[Interval, ...]
    provisional: bool

    @property
    def total_s(self) -> float:
        """Seconds since the first submission."""
        return self.intervals[-1].end - self.intervals[0].begin if self.intervals else 0.0

    def seconds(self) -> dict[str, float]:
        """The seconds of each category, in the order of CATEGORIES."""
        sums = dict.fromkeys(CATEGORIES, 0.0)
        for begin, end, category, _ in self.intervals:
            sums[category] += end - begin
        return sums


def book(
    history: RunView,
    now: float,
    state: str = "unknown",
    newest_step: float | None = None,
    submitted: float | None = None,
    waited: Iterable[Wait] = (),
) -> Booking:
    """Books a run's time up to ``now``, or to its end.

    Args:
        history: the run's.
        now: unix seconds.
        state: a word of ``run_states.WORDS``, or limited: what the run does after its records end.
        newest_step: when the newest line of the metrics was written, if there is one.
        submitted: when the run's job was submitted, for a run without a history.
        waited: when ranks waited for stragglers, oldest first.
    """
    attempts = _attempts(history)
    ends = [event.time for event in history.all(RunEnd)]
    ended = bool(ends) and state not in _OF_STATE and (not attempts or ends[-1] >= attempts[-1].launch.time)
    provisional = not ended and state not in RUN_ENDS
    times = [event.time for event in history] + _submissions(history)
    known = [time for time in [*times, submitted] if time is not None]
    if not known:
        return Booking((), provisional)
    latest = max([*known, newest_step or 0.0])
    line = _Line(min(known), now if provisional else ends[-1] if ended else latest)
    for before, attempt, after in zip([None, *attempts], attempts, [*attempts[1:], None], strict=False):
        _book_wait(line, before, attempt)
        _book_attempt(line, attempt, after, state, newest_step)
    waits = not attempts or continues(attempts[-1].end)
    if submitted is not None and not waits:
        line.until(submitted, "down")
    queued = waits and not (attempts and attempts[-1].local)
    following = {**_OF_STATE, "running": "queued" if queued else "launching"}.get(state, "unknown")
    line.until(line.end, following if provisional else "queued" if waits else "down")
    return Booking(tuple(_with_details(line.intervals, attempts, list(waited))), provisional)


def book_run(summary: Summary, state: RunState, history: RunView, now: float, waited: Iterable[Wait] = ()) -> Booking:
    """``book`` for a run as ``list`` knows it."""
    claimed = [claim.time for claim in summary.claims if isinstance(claim, JobClaim) and claim.time is not None]
    step = summary.metrics.get("time")
    limited = state.word == "pending" and state.job is not None and state.job.reason == "JobArrayTaskLimit"
    word = "limited" if limited else state.word
    return book(history, now, word, step if is_time(step) else None, min(claimed, default=None), waited)


def idle_node_s(booking: Booking, history: RunView) -> float:
    """Seconds of attempts, times nodes of the job that had no ranks: spare ones, and those that the run had left."""
    idle: dict[int | None, int] = {
        event.attempt: len(event.spares) + len(event.aside) for event in history.all(Started)
    }
    return sum(one.seconds * idle.get(one.attempt, 0) for one in booking.intervals)


def continues(end: Event | None) -> bool:
    """Whether an attempt ended such that the run was in the queue from then on."""
    return isinstance(end, (Requeued, Resubmitted)) or (isinstance(end, Stopped) and end.then == BY_SLURM)


class _Line:
    """Intervals from ``begin`` to ``end`` without gaps, even if the records have some."""

    def __init__(self, begin: float, end: float) -> None:
        self.at, self.end = begin, max(begin, end)
        self.intervals: list[Interval] = []

    def until(self, time: float, category: str, attempt: int | None = None) -> None:
        """Books the time since the last interval, or nothing if ``time`` has passed already."""
        time = min(time, self.end)
        if time > self.at:
            self.intervals.append(Interval(self.at, time, category, attempt))
            self.at = time


class _Attempt(AttemptView):
    """The events of an attempt, sorted by time: a rank's report may be written late."""

    def __init__(self, attempt: AttemptView, script_loops: bool) -> None:
        super().__init__(attempt.number, sorted(attempt, key=lambda event: event.time))
        self.script_loops = script_loops
        self.started = self.first(Started)
        self.launch = self.started or next(event for event in self if not isinstance(event, _BEFORE))
        self.end = self.first(AttemptEnd)
        self.local = self.started is not None and self.started.pid is not None and self.started.job is None
        self.allocated = self.first(Allocated)

    def submitted(self) -> float | None:
        """When its job was submitted, or requeued."""
        event = self.first(Submitted) or self.allocated
        return None if event is None else _submitted(event)

    def trouble(self) -> tuple[float, str] | None:
        """From when its ranks had failed or hung, and the category of the time until all of them had ended.

        The ranks that wait for one on a dead node hang. That rank failed when its node stopped responding.
        """
        hung, failed = self.first(Hung), self.first(RankFailed)
        if hung is not None:
            return hung.time - (hung.stalled_s or 0.0), "hung"
        if failed is not None:
            return failed.since or failed.time, "hung" if self.has(NodeLost) else "launching"
        return None

    def changes(self) -> Iterator[tuple[float, str]]:
        """When rank 0 began to do something else, and what."""
        before: str | None = None
        for event in self:
            if isinstance(event, Stopping):
                yield from self._stop(event)
            now = _phase(event)
            if before == "importing" and isinstance(event, Training) and event.log is not None:
                now = "training"  # its steps are known only from its output
            before = now or before
            if now == "importing" and not self.script_loops and self.trouble() is None:
                now = "unknown"  # it trains without clusterddp, or not at all
            if now is not None:
                yield event.time, now

    def _stop(self, stopping: Stopping) -> list[tuple[float, str]]:
        """All ranks stop: the last save blocks them, unless the step was saved before."""
        begun = stopping.time
        saves = [event for event in self if isinstance(event, (Checkpoint, CheckpointFailed, CheckpointDamaged))]
        done = [event.time for event in saves if event.time >= begun]
        if done:
            return [(begun, "saving"), (done[-1], "launching")]
        saved = [*self.all(Resumed), *saves][-1:]
        return [(begun, "launching" if saved and saved[0].step == stopping.step else "saving")]


#: Events of a run that never started, or not yet.
_BEFORE = (Submitted, Forked)


def acted(history: RunView) -> list[AttemptView]:
    """The attempts with any activity, oldest first."""
    return [attempt for attempt in history.attempts if any(not isinstance(event, _BEFORE) for event in attempt)]


def _attempts(history: RunView) -> list[_Attempt]:
    loops = history.has(Beginning, StepsSeen)
    return [_Attempt(attempt, loops) for attempt in acted(history)]


def _submitted(event: Submitted | Allocated) -> float | None:
    """When the job of an event was submitted. That is recorded when it starts."""
    return None if event.submitted is None else min(event.submitted, event.time)


def _submissions(history: RunView) -> list[float]:
    """When jobs were submitted. Slurm has the second, and the submission's own record is a little later."""
    own = {event.attempt: min(event.submitted, event.time) for event in history.all(Submitted)}
    known = ((event.attempt, _submitted(event)) for event in history.all(Allocated))
    by_slurm = [(attempt, time) for attempt, time in known if time is not None]
    return [*own.values(), *(min(max(time, own.get(attempt, time)), time + 1) for attempt, time in by_slurm)]


# --- between attempts


def _book_wait(line: _Line, before: _Attempt | None, attempt: _Attempt) -> None:
    """Books the time until the attempt is launched."""
    launched = attempt.launch.time
    end = None if before is None else before.end
    if isinstance(end, Restarted):
        line.until(launched, "launching")
        return
    waited = before is None or continues(end)
    if attempt.local:
        line.until(launched, "launching" if waited else "down")
        return
    if not waited:
        submitted = attempt.submitted()
        line.until(launched if submitted is None else min(submitted, launched), "down")
    allocated = attempt.allocated
    begun = launched if allocated is None else min(allocated.begun, launched)
    if allocated is not None and allocated.eligible is not None:
        eligible = min(allocated.eligible, begun)
        if allocated.limit:  # Slurm does not report how much of the wait was the hold after a requeue
            line.until(min(eligible, line.at + (HOLD_S if before is not None and waited else 0.0)), "held")
            line.until(eligible, "limited")
        line.until(eligible, "held")
    line.until(begun, "queued")
    line.until(launched, "launching")


# --- an attempt


def _book_attempt(
    line: _Line, attempt: _Attempt, after: _Attempt | None, state: str, newest_step: float | None
) -> None:
    """Books an attempt from its launch to its end, or to its last record."""
    seen = newest_step
    if after is not None:
        seen = None if after.started is None else after.started.seen
    if attempt.end is not None:
        end = attempt.end.time
    elif after is None and state == "running":
        end = line.end
    else:
        end = max([*(event.time for event in attempt), seen or 0.0])
    if after is not None:
        end = min(end, after.launch.time)
    trouble = attempt.trouble()
    trouble_at = end if trouble is None else min(end, max(trouble[0], attempt.launch.time))
    # Rank 0 may have made steps after the last heartbeat from the rank at fault.
    earliest = trouble_at - (BEAT_S if attempt.has(Hung) else 0.0)
    if trouble is not None and trouble[1] == "hung" and seen is not None and earliest < seen <= end:
        evaluated = [event.time for event in attempt.all(Evaluated) if event.time <= trouble_at]
        trouble_at = max([seen, attempt.launch.time, *evaluated])
    category = "launching"
    for time, following in attempt.changes():
        line.until(min(time, trouble_at), category, attempt.number)
        category = following
        if time >= trouble_at:
            break
    else:
        line.until(trouble_at, category, attempt.number)
    if trouble is not None:
        line.until(end, trouble[1], attempt.number)


def _phase(event: Event) -> str | None:
    """What rank 0 does from this event on, or None if the event does not tell."""
    if isinstance(event, Finishing):
        return "saving"
    if not isinstance(event, Phase):
        return None
    phase = event.phase  # perhaps one of a newer version
    return _OF_PHASE.get(phase, phase) if phase in PHASES else "unknown"


# --- details within attempts


def _with_details(intervals: list[Interval], attempts: Sequence[_Attempt], waited: Sequence[Wait]) -> list[Interval]:
    """The same with evaluations, saves, stragglers, stalls and lost work, which later events reveal."""
    evaluations: list[tuple[float, float]] = []
    saves: list[tuple[float, float]] = []
    repeated: list[tuple[float, float]] = []
    stopped: list[tuple[float, float]] = []
    for attempt in attempts:
        if attempt.unread:
            repeated.append((0.0, attempt.launch.time))
        for event in attempt:
            if isinstance(event, Evaluated):
                evaluations.append((event.time - event.seconds, event.time))
            elif isinstance(event, Checkpoint):
                begun = event.time - max(event.blocked_s, event.durable_s)
                saves.append((begun, begun + event.blocked_s))
            elif isinstance(event, (Suspended, Stalled)):
                stopped.append((event.time - event.seconds, event.time))
            elif isinstance(event, OwnResume) and (event.file is not None or event.from_start):
                # The work since that checkpoint. Without known steps, it is unknown when it is repeated.
                repeated.append((event.written or 0.0, attempt.launch.time))
    if not any(map(_is_numbered, (event for attempt in attempts for event in attempt))):
        seen = any(attempt.script_loops for attempt in attempts)
        work = frozenset(("training",) if seen else ("unknown", "importing"))
        intervals = laid_over(intervals, repeated, "repeating", work)
    intervals = laid_over(intervals, evaluations, "evaluating", _IN_LOOP | {"importing", "unknown"})
    intervals = laid_over(intervals, saves, "saving", _IN_LOOP | {"evaluating"})
    intervals = laid_over(intervals, stopped, "hung", _IN_SCRIPT)
    hung = [one for one in intervals if one.category == "hung"]
    waited = [_without(one, hung) for one in waited]
    marked = laid_over(intervals, [(one.begin, one.end) for one in waited], "straggler", frozenset(("training",)))
    return shared(marked, waited)


def _without(wait: Wait, hung: Iterable[Interval]) -> Wait:
    """The same without the stalls, in which the others also waited for a rank: these are booked as hung."""
    hung_s = sum(max(0.0, min(one.end, wait.end) - max(one.begin, wait.begin)) for one in hung)
    whole_s = wait.end - wait.begin
    return wait._replace(share=max(0.0, wait.share * whole_s - hung_s) / max(whole_s - hung_s, 1e-9))


def _is_numbered(event: Event) -> bool:
    """Whether a loop of clusterddp has begun, which reports when it repeats steps."""
    return isinstance(event, Resumed) or (isinstance(event, Training) and event.log is None)


# --- what is laid over intervals


def laid_over(
    intervals: Iterable[Interval], spans: Iterable[tuple[float, float]], category: str, onto: frozenset[str]
) -> list[Interval]:
    """The parts of ``intervals`` of the categories ``onto`` that lie in ``spans`` become ``category``."""
    waiting = sorted(spans)
    if not waiting:
        return list(intervals)
    found: list[Interval] = []
    next_span = 0
    for whole in intervals:
        while next_span < len(waiting) and waiting[next_span][1] <= whole.begin:
            next_span += 1
        at = whole.begin
        for index in range(next_span, len(waiting)) if whole.category in onto else ():
            begin, end = waiting[index]
            if begin >= whole.end:
                break
            begin, end = max(begin, at), min(end, whole.end)
            if end > begin:
                found += [Interval(at, begin, whole.category, whole.attempt)] if begin > at else []
                found.append(Interval(begin, end, category, whole.attempt))
                at = end
        if whole.end > at:
            found.append(whole if at == whole.begin else Interval(at, whole.end, whole.category, whole.attempt))
    return found


def shared(intervals: Iterable[Interval], waited: Iterable[Wait]) -> list[Interval]:
    """Books only a share of the time in which a rank was slow as waiting, at the beginning."""
    found: list[Interval] = []
    spans = deque(waited)
    for one in intervals:
        if one.category == "straggler":
            while spans and spans[0].end <= one.begin:
                spans.popleft()
            until = one.begin + one.seconds * (spans[0].share if spans else 0.0)
            found.append(Interval(one.begin, until, "straggler", one.attempt))
            one = Interval(until, one.end, "training", one.attempt)
        if one.end > one.begin:
            found.append(one)
    return found
