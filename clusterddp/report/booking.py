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
from typing import Any, NamedTuple

from clusterddp.history.beginnings import unread
from clusterddp.history.words import ATTEMPT_ENDS, BY_SLURM, PHASES, RUN_ENDS
from clusterddp.rundir.schemas import is_time
from clusterddp.rundir.summary import Summary
from clusterddp.slurm.run_states import RunState

Event = Mapping[str, Any]

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
    events: Iterable[Event],
    now: float,
    state: str = "unknown",
    newest_step: float | None = None,
    submitted: float | None = None,
    waited: Iterable[Wait] = (),
) -> Booking:
    """Books a run's time up to ``now``, or to its end.

    Args:
        events: the run's history.
        now: unix seconds.
        state: a word of ``run_states.WORDS``, or limited: what the run does after its records end.
        newest_step: when the newest line of the metrics was written, if there is one.
        submitted: when the run's job was submitted, for a run without a history.
        waited: when ranks waited for stragglers, oldest first.
    """
    events = list(events)
    attempts = _attempts(events)
    ends = [event["time"] for event in events if event["event"] in RUN_ENDS]
    ended = bool(ends) and state not in _OF_STATE and (not attempts or ends[-1] >= attempts[-1].launch["time"])
    provisional = not ended and state not in RUN_ENDS
    times = [event["time"] for event in events] + _submissions(events)
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


def book_run(
    summary: Summary, state: RunState, events: Iterable[Event], now: float, waited: Iterable[Wait] = ()
) -> Booking:
    """``book`` for a run as ``list`` knows it."""
    claimed = [claim["time"] for claim in summary.claims if is_time(claim.get("time"))]
    step = summary.metrics.get("time")
    limited = state.word == "pending" and state.job is not None and state.job.reason == "JobArrayTaskLimit"
    word = "limited" if limited else state.word
    return book(events, now, word, step if is_time(step) else None, min(claimed, default=None), waited)


def idle_node_s(booking: Booking, events: Iterable[Event]) -> float:
    """Seconds of attempts, times nodes of the job that had no ranks: spare ones, and those that the run had left."""
    idle: dict[int | None, int] = {
        attempt.number: len(attempt.launch.get("spares", ())) + len(attempt.launch.get("aside", ()))
        for attempt in _attempts(list(events))
    }
    return sum(one.seconds * idle.get(one.attempt, 0) for one in booking.intervals)


def continues(end: Event | None) -> bool:
    """Whether an attempt ended such that the run was in the queue from then on."""
    if end is None:
        return False
    return end["event"] in ("requeued", "resubmitted") or end.get("then") == BY_SLURM


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


class _Attempt:
    """The events of an attempt, sorted by time: a rank's report may be written late."""

    def __init__(self, number: int, events: list[Event], script_loops: bool) -> None:
        self.number = number
        self.events = sorted(events, key=lambda event: event["time"])
        self.script_loops = script_loops
        self.launch = self.first("started") or next(
            event for event in self.events if event["event"] not in ("submitted", "forked")
        )
        self.end = next((event for event in self.events if event["event"] in ATTEMPT_ENDS), None)
        self.local = "pid" in self.launch and "job" not in self.launch

    def first(self, name: str) -> Event | None:
        return next((event for event in self.events if event["event"] == name), None)

    def submitted(self) -> float | None:
        """When its job was submitted, or requeued."""
        event = self.first("submitted")
        return _submitted(event) if event is not None else self.allocated("submitted")

    def allocated(self, name: str) -> float | None:
        event = self.first("allocated")
        value = event.get(name) if event is not None else None
        return value if is_time(value) else None

    def trouble(self) -> tuple[float, str] | None:
        """From when its ranks had failed or hung, and the category of the time until all of them had ended.

        The ranks that wait for one on a dead node hang. That rank failed when its node stopped responding.
        """
        hung, failed = self.first("hung"), self.first("rank_failed")
        if hung is not None:
            return hung["time"] - _seconds(hung, "stalled_s"), "hung"
        if failed is not None:
            category = "launching" if self.first("node_lost") is None else "hung"
            return _seconds(failed, "since") or failed["time"], category
        return None

    def changes(self) -> Iterator[tuple[float, str]]:
        """When rank 0 began to do something else, and what."""
        before: str | None = None
        for event in self.events:
            if event["event"] == "stopping":
                yield from self._stop(event)
            now = _phase(event)
            if before == "importing" and event["event"] == "training" and "log" in event:
                now = "training"  # its steps are known only from its output
            before = now or before
            if now == "importing" and not self.script_loops and self.trouble() is None:
                now = "unknown"  # it trains without clusterddp, or not at all
            if now is not None:
                yield event["time"], now

    def _stop(self, stopping: Event) -> list[tuple[float, str]]:
        """All ranks stop: the last save blocks them, unless the step was saved before."""
        begun = stopping["time"]
        saves = [event for event in self.events if event["event"].startswith("checkpoint")]
        done = [event["time"] for event in saves if event["time"] >= begun]
        if done:
            return [(begun, "saving"), (done[-1], "launching")]
        resumed = [event for event in self.events if event["event"] == "resumed"]
        saved = [*resumed, *saves][-1:]
        return [(begun, "launching" if saved and saved[0].get("step") == stopping.get("step") else "saving")]


def _attempts(events: Sequence[Event]) -> list[_Attempt]:
    """The attempts with any activity, oldest first."""
    own: dict[int, list[Event]] = {}
    for event in events:
        own.setdefault(event["attempt"], []).append(event)
    loops = any(event["event"] in ("training", "resumed", "steps_seen") for event in events)
    acted = {number for number, found in own.items() if any(e["event"] not in ("submitted", "forked") for e in found)}
    return [_Attempt(number, own[number], loops) for number in sorted(acted)]


def _submitted(event: Event) -> float | None:
    """When the job of an event ``submitted`` was submitted. That is recorded when it starts."""
    time = event.get("submitted") if event["event"] in ("submitted", "allocated") else None
    return min(time, event["time"]) if is_time(time) else None


def _submissions(events: Sequence[Event]) -> list[float]:
    """When jobs were submitted. Slurm has the second, and the submission's own record is a little later."""
    known = [(event, time) for event in events if (time := _submitted(event)) is not None]
    own = {event["attempt"]: time for event, time in known if event["event"] == "submitted"}
    by_slurm = [(event["attempt"], time) for event, time in known if event["event"] == "allocated"]
    return [*own.values(), *(min(max(time, own.get(attempt, time)), time + 1) for attempt, time in by_slurm)]


def _seconds(event: Event, name: str) -> float:
    value: Any = event.get(name)
    return float(value) if is_time(value) else 0.0


# --- between attempts


def _book_wait(line: _Line, before: _Attempt | None, attempt: _Attempt) -> None:
    """Books the time until the attempt is launched."""
    launched = attempt.launch["time"]
    end = None if before is None else before.end
    if end is not None and end["event"] == "restarted":
        line.until(launched, "launching")
        return
    waited = before is None or continues(end)
    if attempt.local:
        line.until(launched, "launching" if waited else "down")
        return
    if not waited:
        submitted = attempt.submitted()
        line.until(launched if submitted is None else min(submitted, launched), "down")
    eligible, begun = attempt.allocated("eligible"), attempt.allocated("begun")
    if eligible is not None:
        eligible = min(eligible, begun or launched, launched)
        if attempt.allocated("limit"):  # Slurm does not report how much of the wait was the hold after a requeue
            line.until(min(eligible, line.at + (HOLD_S if before is not None and waited else 0.0)), "held")
            line.until(eligible, "limited")
        line.until(eligible, "held")
    line.until(launched if begun is None else min(begun, launched), "queued")
    line.until(launched, "launching")


# --- an attempt


def _book_attempt(
    line: _Line, attempt: _Attempt, after: _Attempt | None, state: str, newest_step: float | None
) -> None:
    """Books an attempt from its launch to its end, or to its last record."""
    seen = after.launch.get("seen") if after is not None else newest_step
    if attempt.end is not None:
        end = attempt.end["time"]
    elif after is None and state == "running":
        end = line.end
    else:
        own = [event["time"] for event in attempt.events]
        end = max([*own, seen] if is_time(seen) else own)
    if after is not None:
        end = min(end, after.launch["time"])
    trouble = attempt.trouble()
    trouble_at = end if trouble is None else min(end, max(trouble[0], attempt.launch["time"]))
    # Rank 0 may have made steps after the last heartbeat from the rank at fault.
    earliest = trouble_at - (BEAT_S if attempt.first("hung") else 0.0)
    if trouble is not None and trouble[1] == "hung" and is_time(seen) and earliest < seen <= end:
        evaluated = [event["time"] for event in attempt.events if event["event"] == "evaluated"]
        trouble_at = max([seen, attempt.launch["time"], *(time for time in evaluated if time <= trouble_at)])
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
    if event["event"] == "finishing":
        return "saving"
    if event["event"] != "phase":
        return None
    phase = str(event.get("phase"))  # perhaps one of a newer version
    return _OF_PHASE.get(phase, phase) if phase in PHASES else "unknown"


# --- details within attempts


def _with_details(intervals: list[Interval], attempts: Sequence[_Attempt], waited: Sequence[Wait]) -> list[Interval]:
    """The same with evaluations, saves, stragglers, stalls and lost work, which later events reveal."""
    evaluations: list[tuple[float, float]] = []
    saves: list[tuple[float, float]] = []
    repeated: list[tuple[float, float]] = []
    stopped: list[tuple[float, float]] = []
    for attempt in attempts:
        if unread(attempt.events):
            repeated.append((0.0, attempt.launch["time"]))
        for event in attempt.events:
            if event["event"] == "evaluated":
                evaluations.append((event["time"] - _seconds(event, "seconds"), event["time"]))
            elif event["event"] == "checkpoint":
                blocked = _seconds(event, "blocked_s")
                begun = event["time"] - max(blocked, _seconds(event, "durable_s"))
                saves.append((begun, begun + blocked))
            elif event["event"] in ("suspended", "stalled"):
                stopped.append((event["time"] - _seconds(event, "seconds"), event["time"]))
            elif event["event"] == "own_resume" and ("file" in event or event.get("from_start")):
                # The work since that checkpoint. Without known steps, it is unknown when it is repeated.
                repeated.append((_seconds(event, "written"), attempt.launch["time"]))
    if not any(map(_is_numbered, (event for attempt in attempts for event in attempt.events))):
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
    return event["event"] == "resumed" or (event["event"] == "training" and "log" not in event)


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
