"""What each rank did over time: timing.jsonl as rows, a rank or a host each, over equal parts of a run's time.

A rank's work is waiting for its batch and its own compute time. How much longer that took than on the median rank,
divided by the time of a step, is its excess: the share of a step in which the others wait for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from statistics import median_low
from typing import Any, NamedTuple

from clusterddp.report.curves import short
from clusterddp.rundir.timing import PHASES, TimedInterval, is_slow

#: Parts of a run's time, in a report on one run and at least. The maximum number of rows, of ranks or hosts.
PARTS, LEAST_PARTS, ROWS = 120, 20, 64
#: The share of the time that others waited for a rank to be listed, and the maximum number of listed ranks.
COST, LISTED = 0.05, 8


class Worker(NamedTuple):
    """A rank on a host. After a restart, the rank may be on a different host."""

    host: str
    rank: int


# --- parts of the time


class Cell(NamedTuple):
    """A rank in a part of the time: seconds per step of each of PHASES, and how its work compares."""

    steps: float
    seconds: Sequence[float | None]
    work: float | None
    excess: float | None = None
    slow: bool = False


_Cells = Mapping[int, Mapping[Worker, Cell]]


def ranks_over_time(
    intervals: Sequence[TimedInterval], within: tuple[float, float] | None = None, parts: int = PARTS
) -> dict[str, Any] | None:
    """The data of a report, or None without an interval. ``within``: the time of the run, if its history has it."""
    if not intervals:
        return None
    begin, end = within or (min(one.begin for one in intervals), max(one.end for one in intervals))
    width = max(end - begin, 1.0) / parts
    medians: dict[int, list[float | None]] = {}
    cells: dict[int, dict[Worker, Cell]] = {}
    sums = _summed(intervals, begin, width, parts)
    for part in list(sums):
        cells[part], medians[part] = _compared(sums.pop(part))
    unknown = [None] * len(PHASES)
    return {
        "begin": begin,
        "part_s": width,
        "parts": parts,
        "ranks": len({worker.rank for own in cells.values() for worker in own}),
        "median": {
            phase: [_short(medians.get(part, unknown)[place]) for part in range(parts)]
            for place, phase in enumerate(PHASES)
        },
        "rows": [_row(host, workers, cells, parts) for host, workers in _rows(cells)],
        "slow": _slow(cells, medians, width),
    }


def _summed(
    intervals: Iterable[TimedInterval], begin: float, width: float, parts: int
) -> dict[int, dict[Worker, list[float]]]:
    """For each part and rank, two numbers per phase, its seconds and steps, and the sum of all steps."""
    found: defaultdict[int, dict[Worker, list[float]]] = defaultdict(dict)
    worker_of = cache(Worker)  # one object for all parts
    for one in intervals:
        workers = [worker_of(one.hosts[rank] if one.hosts else "", rank) for rank in range(len(one.steps))]
        phases = [one.seconds[phase] for phase in PHASES]
        for part, share in _shares(one, begin, width, parts):
            own = found[part]
            for worker, steps, *seconds in zip(workers, one.steps, *phases, strict=True):
                if not steps:
                    continue
                sums = own.setdefault(worker, [0.0] * (2 * len(PHASES) + 1))
                sums[-1] += share * steps
                for place, value in enumerate(seconds):
                    if value is not None:
                        sums[2 * place] += share * value
                        sums[2 * place + 1] += share * steps
    return found


def _shares(interval: TimedInterval, begin: float, width: float, parts: int) -> Iterator[tuple[int, float]]:
    """The parts that an interval lies in, with how much of it. What lies outside is in the first or the last part."""
    first, last = (min(parts - 1, max(0, int((time - begin) / width))) for time in (interval.begin, interval.end))
    if first == last:
        yield first, 1.0
        return
    for part in range(first, last + 1):
        low = interval.begin if part == first else begin + part * width
        high = interval.end if part == last else begin + (part + 1) * width
        if high > low:
            yield part, (high - low) / (interval.end - interval.begin)


def _compared(sums: Mapping[Worker, Sequence[float]]) -> tuple[dict[Worker, Cell], list[float | None]]:
    """The ranks in a part of the time, and the median of each phase, in seconds per step."""
    cells: dict[Worker, Cell] = {}
    for worker, own in sums.items():
        seconds = tuple(own[at] / own[at + 1] if own[at + 1] else None for at in range(0, 2 * len(PHASES), 2))
        work = None if seconds[1] is None else seconds[1] + (seconds[0] or 0.0)
        cells[worker] = Cell(own[-1], seconds, work)
    medians = [_median(cell.seconds[place] for cell in cells.values()) for place in range(len(PHASES))]
    usual = _median(cell.work for cell in cells.values())
    whole = _median(sum(value for value in cell.seconds if value is not None) for cell in cells.values())
    # waiting may be unknown, but a step takes at least as long as the slowest rank's work
    step = max(whole or 0.0, max((cell.work or 0.0 for cell in cells.values()), default=0.0))
    if usual is not None and step and len(cells) > 1:
        for worker, cell in cells.items():
            if cell.work is not None:
                excess, slow = max(0.0, cell.work - usual) / step, is_slow(cell.work, usual, step)
                cells[worker] = cell._replace(excess=excess, slow=slow)
    return cells, medians


def _median(values: Iterable[float | None]) -> float | None:
    """The median, and of two values the lower one, because the other rank is slow."""
    known = [value for value in values if value is not None]
    return median_low(known) if known else None


def _short(value: float | None) -> float | None:
    return None if value is None else short(value)


# --- rows


def _rows(cells: _Cells) -> list[tuple[str | None, list[Worker]]]:
    """The ranks of each row, host by host: one if there is room, otherwise a host's. The hosts that are the least slow
    share a row without a name."""
    workers = list(dict.fromkeys(worker for part in sorted(cells) for worker in sorted(cells[part], key=_by_rank)))
    hosts: dict[str, list[Worker]] = {}
    for worker in workers:
        hosts.setdefault(worker.host, []).append(worker)
    if len(workers) <= ROWS:
        return [(host, [worker]) for host, own in hosts.items() for worker in sorted(own, key=_by_rank)]
    if len(hosts) <= ROWS:
        return list(hosts.items())
    worst: defaultdict[str, float] = defaultdict(float)
    for own in cells.values():
        for worker, cell in own.items():
            worst[worker.host] += (cell.excess or 0.0) * cell.steps
    kept = set(sorted(hosts, key=lambda host: -worst[host])[: ROWS - 1])
    rest = [worker for host, own in hosts.items() if host not in kept for worker in own]
    return [*((host, own) for host, own in hosts.items() if host in kept), (None, rest)]


def _by_rank(worker: Worker) -> int:
    return worker.rank


def _row(host: str | None, workers: Sequence[Worker], cells: _Cells, parts: int) -> dict[str, Any]:
    """A row: in each part of the time, the figures of the rank whose work took longest."""
    shown: list[Cell | None] = []
    for part in range(parts):
        own = cells.get(part, {})
        found = [own[worker] for worker in workers if worker in own]
        shown.append(max(found, key=lambda cell: -1.0 if cell.work is None else cell.work, default=None))
    return {
        "host": host,
        "ranks": sorted({worker.rank for worker in workers}),
        "excess": [None if cell is None or cell.excess is None else round(cell.excess, 3) for cell in shown],
        **{
            phase: [None if cell is None else _short(cell.seconds[place]) for cell in shown]
            for place, phase in enumerate(PHASES)
        },
    }


# --- slow ranks


def _slow(cells: _Cells, medians: Mapping[int, Sequence[float | None]], width: float) -> list[dict[str, Any]]:
    """The ranks that cost most: whose excess, while they were slow, is COST of the time in which there were steps."""
    found: defaultdict[Worker, list[tuple[Cell, Sequence[float | None]]]] = defaultdict(list)
    for part, own in cells.items():
        for worker, cell in own.items():
            if cell.slow:
                found[worker].append((cell, medians[part]))
    cost = {worker: sum(cell.excess or 0.0 for cell, _ in own) / len(cells) for worker, own in found.items()}
    listed = sorted((worker for worker in cost if cost[worker] >= COST), key=lambda worker: -cost[worker])
    return [_cost(worker, found[worker], cost[worker], width) for worker in listed[:LISTED]]


def _cost(
    worker: Worker, own: Sequence[tuple[Cell, Sequence[float | None]]], cost: float, width: float
) -> dict[str, Any]:
    """A slow rank, in the parts of the time in which it was slow."""
    steps = sum(cell.steps for cell, _ in own)
    means = [sum(cell.steps * (cell.seconds[place] or 0.0) for cell, _ in own) / steps for place in range(len(PHASES))]
    usual = [sum(cell.steps * (median[place] or 0.0) for cell, median in own) / steps for place in range(len(PHASES))]
    return {
        "rank": worker.rank,
        "host": worker.host,
        "slow_s": round(width * len(own), 1),
        "excess": round(cost, 4),
        "work_s": short(means[0] + means[1]),
        "median_s": short(usual[0] + usual[1]),
        "phase": PHASES[0] if means[0] - usual[0] > means[1] - usual[1] else PHASES[1],
    }
