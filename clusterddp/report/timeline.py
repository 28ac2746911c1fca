"""A run's timeline: a lane per attempt, from the end of the attempt before it to its own end, and why it ended."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from clusterddp.errors import ClusterddpError
from clusterddp.history.words import ATTEMPT_ENDS, RUN_ENDS
from clusterddp.hostlist import expand
from clusterddp.report.booking import Booking, Interval
from clusterddp.report.theme import clipped
from clusterddp.reporter import counted
from clusterddp.rundir.schemas import is_count

Event = Mapping[str, Any]
#: An event's sentence, or None for one that is only recorded (``history/``).
Sentence = Callable[[Event], "str | None"]
#: The number of parts into which the lanes of a run divide its time. Each is in one lane, or in two.
_PARTS = 2000
#: The maximum number of characters of why an attempt ended, in short and in a sentence.
_HOW, _WORDS = 100, 600
_IN_PROGRESS, _NO_RECORD = "in progress", "ended without a record"
#: Events of a run that never started, or not yet.
_BEFORE = frozenset(("submitted", "forked"))


def lanes(booking: Booking, events: Sequence[Event], sentence: Sentence, state: str) -> list[dict[str, Any]]:
    """The attempts, oldest first. A run that has not started has one without a number. ``state``: of the run."""
    own: dict[int, list[Event]] = {}
    for event in events:
        own.setdefault(event["attempt"], []).append(event)
    acted = sorted(number for number, found in own.items() if any(event["event"] not in _BEFORE for event in found))
    numbers: list[int | None] = [*acted] or [None]
    booked = _by_lane(booking.intervals, numbers)
    width = booking.total_s / _PARTS
    found = []
    for number, after in zip(numbers, [*numbers[1:], None], strict=True):
        if number is None:
            attempt = _not_started()
        else:
            following = None if after is None else _newest(own[after], ("started",)) or {}
            attempt = _attempt(own[number], sentence, state, following)
        seconds: defaultdict[str, float] = defaultdict(float)
        for interval in booked[number]:
            seconds[interval.category] += interval.seconds
        found.append(
            {
                "attempt": number,
                "begin": booked[number][0].begin if booked[number] else None,
                "end": booked[number][-1].end if booked[number] else None,
                **attempt,
                "seconds": dict(seconds),
                "spans": _spans(booked[number], booking.intervals[0].begin if booking.intervals else 0.0, width),
            }
        )
    return found


def _by_lane(intervals: Iterable[Interval], numbers: Sequence[int | None]) -> dict[int | None, list[Interval]]:
    """Each lane's intervals. The time before an attempt belongs to it, and the time after the last one to the last."""
    found: dict[int | None, list[Interval]] = {number: [] for number in numbers}
    waiting: list[Interval] = []
    for interval in intervals:
        waiting.append(interval)
        if interval.attempt is not None and interval.attempt in found:
            found[interval.attempt] += waiting
            waiting = []
    found[numbers[-1]] += waiting
    return found


def _spans(intervals: Iterable[Interval], began: float, width: float) -> list[list[Any]]:
    """``[begin, end, category]``: of each part of ``width`` seconds the category that took most of it."""
    parts: defaultdict[int, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for one in intervals:
        first = int((one.begin - began) / width)
        last = max(first, int((one.end - began) / width - 1e-9))
        for part in range(first, last + 1):
            low, high = began + part * width, began + (part + 1) * width
            parts[part][one.category] += min(one.end, high) - max(one.begin, low)
    found: list[list[Any]] = []
    for part, seconds in sorted(parts.items()):
        category = max(seconds, key=lambda name: seconds[name])
        if found and found[-1][2] == category and abs(found[-1][1] - (began + part * width)) < width / 2:
            found[-1][1] = began + (part + 1) * width
        else:
            found.append([began + part * width, began + (part + 1) * width, category])
    return found


def _not_started() -> dict[str, Any]:
    return dict.fromkeys(("job", "nodes", "ranks", "began_at", "step", "repeated", "checkpoint", "changed"), None) | {
        "how": "not started",
        "words": "not started",
    }


def _attempt(events: Sequence[Event], sentence: Sentence, state: str, following: Event | None) -> dict[str, Any]:
    """An attempt, from its events. ``how``: a word or two about its end. ``words``: the sentence. ``state``: of the
    run. ``following``: the next attempt's start. None for the newest attempt."""
    started = _newest(events, ("started",)) or {}
    begun = _newest(events, ("training", "resumed")) or {}
    end = _newest(events, ATTEMPT_ENDS)
    if end is not None:
        over = end["event"] in RUN_ENDS and following is None
        reason = end["event"] if over else end.get("reason") or end["event"]
        how = clipped(" ".join(str(reason).split()), _HOW)
        words = clipped(without_attempt(end, sentence) or how, _WORDS)
    elif following is None:
        how = words = state if state in RUN_ENDS else _IN_PROGRESS if state == "running" else _NO_RECORD
    else:
        how, words = _without_record(started, following)
    reached = [event["step"] for event in events if is_count(event.get("step"))]
    job = started.get("job") or (f"process {started['pid']}" if "pid" in started else None)
    return {
        "job": None if job is None else clipped(job, _HOW),
        "nodes": None if started.get("nodes") is None else clipped(started["nodes"], _WORDS),
        "ranks": started.get("ranks") if is_count(started.get("ranks")) else None,
        "began_at": begun.get("step") if is_count(begun.get("step")) else None,
        "step": max(reached, default=None),
        "repeated": begun.get("redone") if is_count(begun.get("redone")) else None,
        "checkpoint": end.get("checkpoint") if end is not None and is_count(end.get("checkpoint")) else None,
        "changed": _texts(started.get("changed")),
        "how": how,
        "words": words,
    }


def _without_record(started: Event, following: Event) -> tuple[str, str]:
    """How an attempt ended whose supervisor could not record it, in short and in a sentence.

    Slurm restarts a job after a preemption, which a supervisor records, or after the failure of one of its nodes. The
    failure of a node other than the first, on which the supervisor runs, is also recorded.
    """
    nodes, job = started.get("nodes"), started.get("job")
    again = job is not None and following.get("job") == job and following.get("restarts") != started.get("restarts")
    if not again or not nodes or not isinstance(nodes, str):
        return _NO_RECORD, _NO_RECORD
    with suppress(ClusterddpError):
        first = clipped(expand(nodes)[0], _HOW // 2)
        words = f"{_NO_RECORD}. Slurm restarted the job, probably because its first node, {first}, failed"
        return f"node {first} probably lost", words
    return _NO_RECORD, _NO_RECORD


def without_attempt(event: Event, sentence: Sentence) -> str | None:
    """An event's sentence without the number of its attempt, which stands beside it."""
    words = sentence(event)
    return None if words is None else words.removeprefix(f"attempt {event['attempt']}: ")


def interruptions(found: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Why attempts ended without ending the run, the most frequent reason first."""
    ends = [lane["how"] for lane in found if lane["attempt"] is not None]
    return dict(Counter(how for how in ends if how not in RUN_ENDS and how != _IN_PROGRESS).most_common())


def in_words(reasons: Mapping[str, int]) -> str:
    """``interrupted 3 times (preempted x2, node n2 lost)``. Empty without interruptions."""
    number = sum(reasons.values())
    if not number:
        return ""
    times = "once" if number == 1 else counted(number, "time")
    shown = list(reasons.items())[:4]
    parts = [reason if 1 in (count, len(reasons)) else f"{reason} x{count}" for reason, count in shown]
    more = number - sum(count for _, count in shown)
    return f"interrupted {times} ({', '.join([*parts, *([f'other reasons {more}'] if more else [])])})"


def _newest(events: Sequence[Event], names: Iterable[str]) -> Event | None:
    wanted = frozenset(names)
    return next((event for event in reversed(events) if event["event"] in wanted), None)


def _texts(value: Any) -> list[str] | None:
    """The texts of a list, or None if it is empty, or no list."""
    return [clipped(part, _WORDS) for part in value] or None if isinstance(value, list) else None
