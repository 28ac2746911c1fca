"""What the GPUs of a run did, by the figures in ``timing.jsonl``: a row per rank, a sentence, advice. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from clusterddp.reporter import counted
from clusterddp.rundir.timing import GPU_FIGURES, GPU_LARGEST, TimedInterval

#: The least share of the time in which GPUs are idle that is worth advice, and in percent that of throttling.
IDLE, THROTTLED = 0.2, 10
#: The most ranks that a sentence names.
_NAMED = 3
#: Why GPUs are idle, by the phase of a step that takes most of that time, and what helps.
_WHY = {
    "data_s": "waiting for batches. Raise `num_workers` of the loader, or make its samples cheaper to read",
    "save_s": "while a save blocked training. Save less often (`checkpoint.every`)",
    "own_s": "between kernels. Record a profile (`clusterddp tell RUN profile=5`): the batch may be too small, or the "
    "script waits for the GPU in each step",
}


def rows(intervals: Iterable[TimedInterval]) -> list[dict[str, Any]]:
    """Each rank of the newest attempt with known figures: the mean over these intervals, of some figures the largest.

    The keys are ``rank``, ``host`` and GPU_FIGURES.
    """
    spans = [span for span in intervals if span.gpus]
    spans = [span for span in spans if span.attempt == spans[-1].attempt]
    return [_row(rank, spans) for rank in range(len(spans[-1].steps) if spans else 0)]


def _row(rank: int, spans: Sequence[TimedInterval]) -> dict[str, Any]:
    row: dict[str, Any] = {"rank": rank, "host": spans[-1].hosts[rank] if spans[-1].hosts else ""}
    for name in GPU_FIGURES:
        known = [(value, span.end - span.begin) for span in spans if (value := span.gpus[name][rank]) is not None]
        row[name] = max((value for value, _ in known), default=None) if name in GPU_LARGEST else _mean(known)
    return row


def _mean(weighted: Sequence[tuple[float, float]]) -> int | None:
    whole = sum(weight for _, weight in weighted)
    return round(sum(value * weight for value, weight in weighted) / whole) if whole else None


def newest(intervals: Sequence[TimedInterval]) -> list[dict[str, Any]]:
    """The same of the newest interval."""
    return rows([span for span in intervals if span.gpus][-1:])


def busy(found: Sequence[Mapping[str, Any]]) -> int | None:
    """The mean percentage of the time in which the GPUs computed."""
    return _mean([(row["busy"], 1.0) for row in found if row["busy"] is not None])


def sentence(found: Sequence[Mapping[str, Any]]) -> str:
    """``71% busy, 61% of memory used, 412 W, at most 66 °C``, and which are throttled or have errors."""
    largest = {name: max((row[name] for row in found if row[name] is not None), default=None) for name in GPU_LARGEST}
    watts = _mean([(row["watts"], 1.0) for row in found if row["watts"] is not None])
    facts = [
        (busy(found), "{}% busy"),
        (largest["memory"], "{}% of memory used"),
        (watts, "{} W"),
        (largest["celsius"], "at most {} °C"),
    ]
    said = ", ".join(words.format(value) for value, words in facts if value is not None)
    return "; ".join(filter(None, [said, *_problems(found)]))


def _problems(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    named = [row for row in found if row["memory_errors"] or (row["throttled"] or 0) >= THROTTLED]
    for row in named[:_NAMED]:
        host = f" ({row['host']})" if row["host"] else ""
        if (row["throttled"] or 0) >= THROTTLED:
            at = "" if row["celsius"] is None else f" at {row['celsius']} °C"
            yield f"rank {row['rank']}{host} throttled {row['throttled']}% of the time{at}"
        if row["memory_errors"]:
            yield f"rank {row['rank']}{host}: {counted(row['memory_errors'], 'uncorrectable memory error')}"
    if len(named) > _NAMED:
        yield counted(len(named) - _NAMED, "other")


def advice(intervals: Iterable[TimedInterval]) -> Iterator[str]:
    """How long the GPUs were idle in the steps, and why, if that is much."""
    spans = [span for span in intervals if span.gpus]
    known = [(value, span.end - span.begin) for span in spans for value in span.gpus["busy"] if value is not None]
    whole = sum(seconds for _, seconds in known)
    idle = 1 - sum(value * seconds for value, seconds in known) / (100 * whole) if whole else 0.0
    if idle < IDLE:
        return
    shares = {
        phase: sum(seconds or 0.0 for span in spans for seconds in span.seconds[phase]) / whole
        for phase in ("data_s", "save_s")
    }
    most = max(shares, key=shares.__getitem__)
    why = _WHY[most if shares[most] >= idle / 2 else "own_s"]
    yield f"The GPUs were idle {100 * idle:.0f}% of the time, mostly {why}"
