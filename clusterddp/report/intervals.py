"""Intervals of a run's time, and what is laid over them: evaluations, saves, waits for stragglers. Pure functions."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class Interval(NamedTuple):
    """``attempt`` is None before the first and between two attempts. Times are unix seconds."""

    begin: float
    end: float
    category: str
    attempt: int | None = None

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return self.end - self.begin


class Wait(NamedTuple):
    """From ``begin`` to ``end`` (unix seconds), the share of a step for which ranks waited for a straggler."""

    begin: float
    end: float
    share: float


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


def measured(estimated: Iterable[Wait], waited: Sequence[Wait]) -> Iterator[Wait]:
    """What was measured, and estimates for the time in which nothing was."""
    known = sorted(waited)
    yield from (one for one in known if one.share > 0)
    for begin, end, share in estimated:
        for one in known:
            if begin < one.begin:
                yield Wait(begin, min(end, one.begin), share)
            begin = max(begin, one.end)
            if begin >= end:
                break
        else:
            yield Wait(begin, end, share)


def shared(intervals: Iterable[Interval], slow: Iterable[Wait]) -> list[Interval]:
    """Of the time in which a rank was slow, only a share was waited: it is booked at the beginning."""
    found: list[Interval] = []
    spans = deque(sorted(slow))
    for one in intervals:
        if one.category == "straggler":
            while spans and spans[0].end <= one.begin:
                spans.popleft()
            waited = one.begin + one.seconds * (spans[0].share if spans else 0.0)
            found.append(Interval(one.begin, waited, "straggler", one.attempt))
            one = Interval(waited, one.end, "training", one.attempt)
        if one.end > one.begin:
            found.append(one)
    return found
