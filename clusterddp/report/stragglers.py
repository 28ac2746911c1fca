"""How fast each rank and each node is, by the times of its steps, and what they cost the others.

Two scores, as in NVIDIA's NVRx: ``relative`` is the work of the fastest rank divided by this one's, and ``own`` this
rank's work when it was fastest divided by its work now. Work is all of a step but the wait for other ranks, in seconds.
Both are 1 at best. ``rundir/timing.py`` defines when a rank is slow compared with the fastest, or with itself before.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean, median_low
from typing import Any, NamedTuple

from clusterddp.report.booking import Wait
from clusterddp.reporter import counted
from clusterddp.rundir.timing import PHASES, TimedInterval, is_slow

#: The number of newest intervals in a score.
LATEST = 3
#: The maximum number of ranks or nodes in a sentence.
_NAMED = 3
_WAIT = PHASES.index("wait_s")
_WORDS = {"data_s": "waiting for its batches", "own_s": "compute", "save_s": "saves"}


@dataclass(frozen=True)
class Score:
    """The score of a rank, or the mean of a node's ranks (``rank`` is None). Unknown scores are None.

    ``work_s``: seconds per step. ``phase``: the one in which it takes longer than the fastest, or than before.
    """

    host: str
    rank: int | None
    work_s: float
    relative: float | None
    own: float | None
    phase: str
    slow: bool

    @property
    def name(self) -> str:
        """``rank 3 (n2)`` or ``n2``."""
        return self.host if self.rank is None else f"rank {self.rank}{f' ({self.host})' if self.host else ''}"


@dataclass(frozen=True)
class Scores:
    """The scores of an attempt's newest intervals."""

    attempt: int
    ranks: tuple[Score, ...]
    nodes: tuple[Score, ...]

    def as_json(self) -> dict[str, Any]:
        """For ``status --json``."""
        nodes = [{name: value for name, value in asdict(one).items() if name != "rank"} for one in self.nodes]
        return {"attempt": self.attempt, "ranks": [asdict(one) for one in self.ranks], "nodes": nodes}

    def sentence(self) -> str:
        """Which ranks are slow, by how much and in what, or empty if none is."""
        nodes = [one for one in self.nodes if one.slow]
        alone = {one.host for one in self.ranks if one.slow} - {one.host for one in nodes}
        found = [*nodes, *(one for one in self.ranks if one.slow and one.host in alone)]
        if not found:
            return ""
        if len({one.rank for one in self.ranks if one.slow}) == len(self.ranks) > 1:
            return f"all ranks: {_how(min(found, key=_worst))}"
        named = [f"{one.name}: {_how(one)}" for one in sorted(found, key=_worst)[:_NAMED]]
        more = [f"{counted(len(found) - _NAMED, 'other')}"] if len(found) > _NAMED else []
        return ". ".join([*named, *more])


def _worst(score: Score) -> float:
    return min(one for one in (score.relative, score.own, 1.0) if one is not None)


def _how(score: Score) -> str:
    than = (
        "the fastest" if score.relative is not None and score.relative <= (score.own or 1.0) else "when it was fastest"
    )
    return f"{1 / max(_worst(score), 1e-3):.1f} times as long per step as {than}, in {_WORDS[score.phase]}"


class _Work(NamedTuple):
    """Seconds per step of each phase, 0 for the wait, and of the whole step."""

    phases: tuple[float, ...]
    step_s: float

    @property
    def seconds(self) -> float:
        return sum(self.phases)


def scores(intervals: Iterable[TimedInterval]) -> Scores | None:
    """The scores of the newest attempt, or None if no rank's work is known."""
    timed = [span for span in intervals if any(span.steps)]
    attempt = max((span.attempt for span in timed), default=0)
    spans = [span for span in timed if span.attempt == attempt]
    ranks = range(max((len(span.steps) for span in spans), default=0))
    now = {rank: work for rank in ranks if (work := _work(spans[-LATEST:], [rank])) is not None}
    if not now:
        return None
    names = spans[-1].hosts
    hosts = {rank: names[rank] if names else "" for rank in now}
    nodes: dict[str, list[int]] = {}
    for rank, host in hosts.items():
        nodes.setdefault(host, []).append(rank)
    best = _best(spans, [*([rank] for rank in now), *nodes.values()])
    fastest = _fastest(now.values())
    of_ranks = {rank: _score(hosts[rank], rank, now[rank], fastest, next(best)) for rank in now}
    if "" in nodes or len(nodes) == 1:
        return Scores(attempt, tuple(of_ranks.values()), ())
    means, found = {host: _mean([now[rank] for rank in own]) for host, own in nodes.items()}, []
    fastest = _fastest(means.values())
    for host, own in nodes.items():
        score = _score(host, None, means[host], fastest, next(best))
        found.append(replace(score, slow=score.slow and all(of_ranks[rank].slow for rank in own)))
    return Scores(attempt, tuple(of_ranks.values()), tuple(found))


def _fastest(works: Collection[_Work]) -> _Work | None:
    """The fastest work, or None if there is only one."""
    return min(works, key=lambda one: one.seconds) if len(works) > 1 else None


def _score(host: str, rank: int | None, work: _Work, fastest: _Work | None, before: _Work) -> Score:
    relative = fastest.seconds / work.seconds if fastest is not None and work.seconds else None
    own = before.seconds / work.seconds if work.seconds else None
    reference = fastest if fastest is not None and (relative or 1.0) <= (own or 1.0) else before
    longer = [mine - theirs for mine, theirs in zip(work.phases, reference.phases, strict=True)]
    slow = is_slow(work.seconds, reference.seconds, work.step_s)
    phase = PHASES[longer.index(max(longer))] if max(longer) > 0 else "own_s"
    rounded = [None if one is None else round(one, 3) for one in (relative, own)]
    return Score(host, rank, round(work.seconds, 6), rounded[0], rounded[1], phase, slow)


def _best(spans: Sequence[TimedInterval], groups: Sequence[Sequence[int]]) -> Iterator[_Work]:
    """For each group of ranks, the work in the LATEST intervals in a row in which they were fastest."""
    fastest = [(math.inf, len(spans))] * len(groups)
    columns = [(_steps(span), _worked(span)) for span in spans]
    for end in range(min(LATEST, len(spans)), len(spans) + 1):
        part = columns[max(0, end - LATEST) : end]
        steps, seconds = (list(map(sum, zip(*(column[at] for column in part), strict=True))) for at in (0, 1))
        each = [one / count if count else math.inf for one, count in zip(seconds, steps, strict=True)]
        for place, group in enumerate(groups):
            together = each[group[0]] if len(group) == 1 else sum(each[rank] for rank in group)
            if together < fastest[place][0]:
                fastest[place] = (together, end)
    for (_, end), group in zip(fastest, groups, strict=True):
        work = _work(spans[max(0, end - LATEST) : end], group)
        assert work is not None  # all are known at the end
        yield work


def _steps(span: TimedInterval) -> list[int]:
    return [steps or 0 for steps in span.steps]


def _worked(span: TimedInterval, save: bool = True) -> list[float]:
    """Seconds in which each rank did not wait for others. Infinite if unknown."""
    data, own, saves = (span.seconds[phase] for phase in ("data_s", "own_s", "save_s"))
    worked = [math.inf if one is None else one + (more or 0.0) for one, more in zip(own, data, strict=True)]
    return [one + (more or 0.0) for one, more in zip(worked, saves, strict=True)] if save else worked


def _work(spans: Sequence[TimedInterval], ranks: Sequence[int]) -> _Work | None:
    """The mean of these ranks' work per step in these intervals, or None if unknown."""
    found = []
    for rank in ranks:
        own = [span for span in spans if rank < len(span.steps) and span.steps[rank]]
        steps = sum(span.steps[rank] or 0 for span in own)
        seconds = [[span.seconds[phase][rank] for span in own] for phase in PHASES]
        if steps and None not in seconds[PHASES.index("own_s")]:
            phases = [sum(one or 0.0 for one in values) / steps for values in seconds]
            found.append(_Work((*phases[:_WAIT], 0.0, *phases[_WAIT + 1 :]), sum(phases)))
    return _mean(found) if found else None


def _mean(works: Sequence[_Work]) -> _Work:
    phases = tuple(mean(values) for values in zip(*(work.phases for work in works), strict=True))
    return _Work(phases, mean(work.step_s for work in works))


# --- what stragglers cost


def waits(intervals: Iterable[TimedInterval]) -> Iterator[Wait]:
    """The intervals in which a rank was slow, by the same measure as for the event ``slow``."""
    for span in intervals:
        each = zip(_worked(span, save=False), _steps(span), strict=True)  # saves are booked on their own
        known = {rank: one / steps for rank, (one, steps) in enumerate(each) if steps and one < math.inf}
        if known and (share := _waited(span, known)):
            yield Wait(span.begin, span.end, share)


def _waited(span: TimedInterval, active: Mapping[int, float]) -> float:
    """``active``: seconds per step of each rank."""
    slowest = max(active, key=active.__getitem__)
    work = _work([span], [slowest])
    if len(active) == 1 or work is None:
        return 0.0
    usual = median_low(sorted(active.values())[:-1])
    slow = is_slow(active[slowest], usual, work.step_s)
    return min(1.0, (active[slowest] - usual) / work.step_s) if slow else 0.0
