"""Simulated step times of a run: ``timing.jsonl`` as its supervisor would write it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.timing import PHASES, TimingFile, TimingLines
from tests.reports import beat_of

#: Seconds of a step in each phase other than the wait, of a rank that is as fast as the others.
USUAL = {"data_s": 0.002, "own_s": 0.1, "save_s": 0.0001}
BEGAN = 1_790_000_000.0


def timing_lines(
    hosts: Sequence[str],
    seconds: float,
    *,
    attempt: int = 0,
    begin: float = BEGAN,
    began: float = BEGAN,
    slow: Mapping[int, tuple[str, float]] | None = None,
    after: float = 0.0,
    beat_s: float = 2.0,
) -> list[dict[str, Any]]:
    """The lines of an attempt that trains from ``begin`` for so many seconds, with a rank per host.

    ``slow``: for a rank, the phase in which it is slow, by which factor, from ``after`` seconds on. ``began``: when the
    run began.
    """
    ranks, generator = range(len(hosts)), random.Random(attempt)
    timing, lines = TimingLines(attempt, len(hosts), began), []
    totals = [[0, 0.0, 0.0, 0.0, 0.0] for _ in ranks]
    now = begin
    while now < begin + seconds:
        now += beat_s
        factors = dict(slow or {}) if now - begin > after else {}
        own = [
            {
                name: usual * (factors[rank][1] if factors.get(rank, ("",))[0] == name else 1.0)
                for name, usual in USUAL.items()
            }
            for rank in ranks
        ]
        longest = max(sum(one.values()) for one in own) * 1.05
        steps = int(beat_s / longest)
        for rank in ranks:
            phases = {name: usual * generator.uniform(0.98, 1.02) for name, usual in own[rank].items()}
            phases["wait_s"] = longest - sum(own[rank].values())
            totals[rank] = [totals[rank][0] + steps] + [
                total + steps * phases[name] for total, name in zip(totals[rank][1:], PHASES, strict=True)
            ]
            timing.update(rank, beat_of({"timing": totals[rank]}), now)
        if timing.due(now):
            lines += timing.interval(now, hosts)
    return lines + timing.interval(now, hosts)


def write_timings(run: RunDirectory, lines: Sequence[Mapping[str, Any]]) -> None:
    """Appends lines to a run's file."""
    TimingFile(run).append(lines)
