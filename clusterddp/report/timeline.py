"""A run's timeline: a lane per attempt, from the end of the attempt before it to its own end, and why it ended."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from clusterddp.errors import ClusterddpError
from clusterddp.history.beginnings import Beginning, Started
from clusterddp.history.codec import words_of
from clusterddp.history.ends import AttemptEnd, Continues, RunEnd
from clusterddp.history.view import AttemptView, RunView
from clusterddp.history.words import RUN_ENDS
from clusterddp.hostlist import expand
from clusterddp.report.booking import Booking, Interval, acted
from clusterddp.report.theme import clipped
from clusterddp.reporter import counted

#: The number of parts into which the lanes of a run divide its time. Each is in one lane, or in two.
_PARTS = 2000
#: The maximum number of characters of why an attempt ended, in short and in a sentence.
_HOW, _WORDS = 100, 600
_IN_PROGRESS, _NO_RECORD = "in progress", "ended without a record"


def lanes(booking: Booking, history: RunView, state: str) -> list[dict[str, Any]]:
    """The attempts, oldest first. A run that has not started has one without a number. ``state``: of the run."""
    numbers: list[int | None] = [*(attempt.number for attempt in acted(history))] or [None]
    booked = _by_lane(booking.intervals, numbers)
    width = booking.total_s / _PARTS
    found = []
    for number, after in zip(numbers, [*numbers[1:], None], strict=True):
        if number is None:
            attempt = _not_started()
        else:
            following = None if after is None else history.attempt(after)
            attempt = _attempt(history.attempt(number), state, following)
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


def _attempt(attempt: AttemptView, state: str, following: AttemptView | None) -> dict[str, Any]:
    """An attempt. ``how``: a word or two about its end. ``words``: the sentence. ``state``: of the run. ``following``:
    the next attempt. None for the newest attempt."""
    started, begun = attempt.last(Started), attempt.last(Beginning)
    end = attempt.last(AttemptEnd)
    if end is not None:
        over = isinstance(end, RunEnd) and following is None
        reason = "" if over or not isinstance(end, (Continues, RunEnd)) else end.reason
        how = clipped(" ".join((reason or end.name).split()), _HOW)
        words = clipped(words_of(end) or how, _WORDS)
    elif following is None:
        how = words = state if state in RUN_ENDS else _IN_PROGRESS if state == "running" else _NO_RECORD
    else:
        how, words = _without_record(started, following.last(Started))
    job = None
    if started is not None:
        job = started.job or (None if started.pid is None else f"process {started.pid}")
    return {
        "job": None if job is None else clipped(job, _HOW),
        "nodes": None if started is None else clipped(started.nodes, _WORDS),
        "ranks": None if started is None else started.ranks,
        "began_at": None if begun is None else begun.step,
        "step": max((event.at_step for event in attempt if event.at_step is not None), default=None),
        "repeated": None if begun is None else begun.redone,
        "checkpoint": end.checkpoint if isinstance(end, Continues) else None,
        "changed": None if started is None else [clipped(part, _WORDS) for part in started.changed] or None,
        "how": how,
        "words": words,
    }


def _without_record(started: Started | None, following: Started | None) -> tuple[str, str]:
    """How an attempt ended whose supervisor could not record it, in short and in a sentence.

    Slurm restarts a job after a preemption, which a supervisor records, or after the failure of one of its nodes. The
    failure of a node other than the first, on which the supervisor runs, is also recorded.
    """
    if started is None or following is None or started.job is None or not started.nodes:
        return _NO_RECORD, _NO_RECORD
    if following.job != started.job or following.restarts == started.restarts:
        return _NO_RECORD, _NO_RECORD
    with suppress(ClusterddpError):
        first = clipped(expand(started.nodes)[0], _HOW // 2)
        words = f"{_NO_RECORD}. Slurm restarted the job, probably because its first node, {first}, failed"
        return f"node {first} probably lost", words
    return _NO_RECORD, _NO_RECORD


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
