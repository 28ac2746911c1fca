"""Where the time of a soaked run went, from what its script, the injector, Slurm and /proc wrote down.

A recomputation that shares no code with clusterddp and reads none of its records.

A record is ``[time, who, what, value]``, with CLOCK_REALTIME seconds:

- ``A-R`` (attempt and rank): the lines of tests/scripts/known_times.py
- ``slurm``: slurmctld's log. ``submitted``, ``started`` (value: when the job could start, or None), ``requeue`` (asked
  for) and ``requeued_after_failure``, of a node
- ``proc``: ``rank`` and ``supervisor``, processes at their begin; the value is their end
- ``injector``: each fault, with the attempt it hit
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Record = tuple[float, str, str, Any]
Span = tuple[float, float, str]

#: What rank 0's lines begin. After a save, an evaluation or a stall it does again what it did before.
_BEGINS = {
    **{name: name for name in ("importing", "rendezvous", "restoring", "first_step", "evaluating", "saving")},
    "stepping": "training",
    "stalling": "hung",
    "after": "unknown",
    "left": "launching",
}
#: Faults that end an attempt at once, and what its ranks do until all of them have ended.
_CUTS = {
    **dict.fromkeys(("kill", "kill_all", "segv", "crash"), "launching"),
    **dict.fromkeys(("hang", "dead_node"), "hung"),
    "dead_batch_host": "down",
}


@dataclass(frozen=True)
class Fault:
    """An injected fault that an attempt did not survive."""

    time: float
    kind: str
    attempt: int


def faults(records: Iterable[Record]) -> list[Fault]:
    """The faults, oldest first."""
    return [Fault(time, what, value) for time, who, what, value in sorted(records, key=_time) if who == "injector"]


def spans(records: Sequence[Record]) -> list[Span]:
    """What the run did from its first submission to the end of its last process, without gaps."""
    records = sorted(records, key=_time)
    begin = _times(records, "slurm", "submitted")[0]
    end = max(value for _, who, what, value in records if (who, what) == ("proc", "supervisor"))
    changes = list(_waits(records, begin))
    reached = 0
    for attempt in sorted({int(who.partition("-")[0]) for _, who, _, _ in records if who[0].isdigit()}):
        own, reached = _attempt(records, attempt, reached)
        changes += own
    changes = [(max(begin, min(end, time)), what) for time, what in sorted(changes, key=lambda change: change[0])]
    ends = [*(time for time, _ in changes[1:]), end]
    whole = [(time, until, what) for (time, what), until in zip(changes, ends, strict=True) if until > time]
    return list(_with_straggler(whole, records))


def seconds(found: Iterable[Span], begin: float = 0.0, end: float = float("inf")) -> dict[str, float]:
    """The seconds of each category, between two moments."""
    sums: dict[str, float] = {}
    for first, last, what in found:
        if (length := min(last, end) - max(first, begin)) > 0:
            sums[what] = sums.get(what, 0.0) + length
    return sums


def _time(record: Record) -> float:
    return record[0]


def _times(records: Iterable[Record], who: str, what: str) -> list[float]:
    return [time for time, by, name, _ in records if (by, name) == (who, what)]


# --- without nodes


def _waits(records: Sequence[Record], submitted: float) -> Iterator[tuple[float, str]]:
    """Down until a job of the run was in the queue, held until that could start, queued until it did."""
    supervisors = [(time, value) for time, who, what, value in records if (who, what) == ("proc", "supervisor")]
    back = sorted(_times(records, "slurm", "submitted") + _times(records, "slurm", "requeued_after_failure"))
    away = submitted
    for started, who, what, eligible in records:
        if (who, what) != ("slurm", "started"):
            continue
        yield away, "down"
        # A job that the supervisor submitted, or requeued, was in the queue before the supervisor ended.
        waits = next((time for time in back if away < time < started), away)
        yield waits, "held"
        yield max(waits, eligible or waits), "queued"
        yield started, "launching"
        away = next((_away(records, end) for begin, end in supervisors if begin >= started), started)
    yield away, "down"


def _away(records: Sequence[Record], end: float) -> float:
    """When a job's supervisor ended, at ``end``, or had the run requeued or resubmitted, after the end of its ranks."""
    ranks = [value for time, who, what, value in records if (who, what) == ("proc", "rank") and time < end]
    asked = sorted(_times(records, "slurm", "requeue") + _times(records, "slurm", "submitted"))
    return next((time for time in asked if max(ranks, default=end) < time < end), end)


# --- an attempt


def _attempt(records: Sequence[Record], attempt: int, reached: int) -> tuple[list[tuple[float, str]], int]:
    """What its rank 0 did; and how many steps have been made in all, by it or earlier: ``reached`` before."""
    cut = next((fault for fault in faults(records) if fault.attempt == attempt and fault.kind in _CUTS), None)
    if cut and cut.kind == "crash":
        cut = Fault(_times(records, f"{attempt}-1", "crash")[0], cut.kind, attempt)
    until = cut.time if cut else float("inf")
    own = [(time, what) for time, who, what, _ in records if who == f"{attempt}-0" and time < until]
    steps = [(time, value) for time, who, what, value in records if (who, what) == (f"{attempt}-0", "step")]
    steps = [(time, step) for time, step in steps if time < until]
    changes = _stopped(list(_changes(own)), steps)
    repeated_until = next((time for time, step in steps if step + 1 >= reached), until) if steps else until
    changes = [(time, _repeated(what, time < repeated_until)) for time, what in changes]
    if changes and changes[0][0] < repeated_until < until and _at(changes, repeated_until) == "repeating":
        changes.append((repeated_until, "training"))
    if cut:
        changes += [(cut.time, _CUTS[cut.kind]), *_ended(records, cut)]
    return changes, max([reached, *(step + 1 for _, step in steps)])


def _changes(lines: Iterable[tuple[float, str]]) -> Iterator[tuple[float, str]]:
    now = before = "launching"
    for time, what in lines:
        if what in ("saved", "evaluated", "stalled"):
            now = before
            yield time, now
        elif what in _BEGINS:
            before, now = (before if now in ("saving", "evaluating", "hung") else now), _BEGINS[what]
            yield time, now


def _repeated(what: str, again: bool) -> str:
    return "repeating" if again and what == "training" else what


def _at(changes: Iterable[tuple[float, str]], time: float) -> str | None:
    return max((change for change in changes if change[0] < time), default=(0.0, None))[1]


def _stopped(changes: list[tuple[float, str]], steps: Sequence[tuple[float, int]]) -> list[tuple[float, str]]:
    """A loop ends at the end of its last step: what comes next, a save if it makes one, has begun there."""
    last = steps[-1][0] if steps else float("inf")
    later = [what for time, what in changes if time >= last]
    if not later or not set(later) <= {"saving", "unknown", "launching"}:
        return changes
    place = len(changes) - len(later)
    return [*changes[:place], (last, later[0]), *changes[place + 1 :]]


def _ended(records: Sequence[Record], cut: Fault) -> list[tuple[float, str]]:
    """From when all ranks of the attempt had ended, if they hung. A resubmission gives up those of a dead node."""
    if cut.kind != "hang":
        return []
    alive = [value for time, who, what, value in records if (who, what) == ("proc", "rank") and time < cut.time < value]
    return [(max(alive), "launching")]


# --- a straggler


def _with_straggler(whole: Iterable[Span], records: Iterable[Record]) -> Iterator[Span]:
    """Rank 0 waits in its training for as long as rank 1 does what the others do not."""
    lines = [(time, what) for time, who, what, _ in records if who.endswith("-1") and what in ("slow", "usual")]
    slow = [(a, b) for (a, what), (b, _) in pairwise(lines) if what == "slow"]
    for begin, end, what in whole:
        at = begin
        for first, last in slow if what == "training" else ():
            first, last = max(first, at), min(last, end)
            if last > first:
                yield at, first, what
                yield first, last, "straggler"
                at = last
        yield at, end, what
