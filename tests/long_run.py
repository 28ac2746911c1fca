"""A long run as it is on disk: preempted again and again, with repeated steps, for tests of what reads it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clusterddp.messages.reports import Alive
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.timing import TimingLines, interval_s
from tests.runs_on_disk import BEGAN, event, recorded_run, write_lines

#: Seconds: of a step; in the queue before each attempt, in Slurm's hold after each requeue, from a launch to a step.
STEP_S, QUEUED_S, HELD_S, START_S = 0.5, 60.0, 120.0, 20.0
#: The rank that is slow, from the middle of the run on, and its seconds and those of the others per step.
SLOW, SLOW_S, USUAL_S = 1, 0.4, 0.2
#: Seconds per step in which each rank waits for its batch, and the ranks of a host.
DATA_S, PER_HOST = 0.01, 8
#: Steps between checkpoints, and steps that each attempt but the first repeats.
EVERY, REPEATED = 200, 10


def long_run(path: Path, attempts: int = 3, steps: int = 600, ranks: int = 2, ends: bool = True) -> RunDirectory:
    """A run of ``steps`` steps in equal attempts, all but the last of which are preempted. Every second one lost
    REPEATED steps. ``ends``: whether the last one completes the run."""
    events: list[dict[str, Any]] = []
    lines: list[dict[str, Any]] = []
    timing: list[dict[str, Any]] = []
    now, first, each = BEGAN, 0, steps // attempts
    for attempt in range(attempts):
        last = attempt == attempts - 1
        reached = steps if last else (attempt + 1) * each
        launched = now + (HELD_S if attempt else 0.0) + QUEUED_S
        begins = launched + START_S
        again = REPEATED if attempt and attempt % 2 == 0 else 0
        begin = first - again
        lines += _metrics(begin, reached, attempt, begins)
        ended = begins + STEP_S * (reached - begin) + 1
        timing += _timing(attempt, ranks, (begins, ended), reached - begin, attempt >= attempts / 2)
        events += _attempt(attempt, ranks, (now, launched, begins), begin, again)
        saves = range(begin - begin % EVERY + EVERY, reached + 1, EVERY)
        times = {step: begins + STEP_S * (step - begin) for step in (*saves, reached)}
        events += [event("checkpoint", attempt, time=at, step=step, **_cost(step)) for step, at in times.items()]
        if not last:
            lost = REPEATED if (attempt + 1) % 2 == 0 else 0
            why = {"reason": "preempted", "cause": "preempted", "step": reached, "checkpoint": reached - lost}
            events.append(event("requeued", attempt, time=ended, window_s=1.0, **why))
        elif ends:
            events.append(event("completed", attempt, time=ended, step=steps, attempts=attempts, reason="completed"))
        now, first = ended, reached
    over = (
        {"outcome": {"state": "completed", "step": steps, "attempts": attempts, "reason": "completed"}} if ends else {}
    )
    run = recorded_run(path, events, metrics=lines, **over)
    write_lines(run.timing_file, timing)
    return run


def _attempt(
    number: int, ranks: int, times: tuple[float, float, float], begin: int, again: int
) -> Iterator[dict[str, Any]]:
    submitted, launched, begins = times
    eligible = submitted + (HELD_S if number else 0.0)
    yield event(
        "started", number, time=launched, job="41", restarts=number, nodes="n[1-8]", ranks=ranks, changed=[],
        code={"commit": "1f3a9c21", "torch": "2.13.0"},
    )  # fmt: skip
    yield event("allocated", number, time=launched + 1, submitted=submitted, eligible=eligible, begun=launched)
    for share, phase in enumerate(("importing", "rendezvous", "restoring")):
        yield event("phase", number, time=launched + 5 * (share + 1), phase=phase)
    how = {"step": begin, "redone": again}
    if number:
        yield event("resumed", number, time=begins - 1, parent={"attempt": number - 1, "step": 0}, inexact=[], **how)
    else:
        yield event("progress", number, time=begins - 1, rank=0, step=0, steps=100_000)
        yield event("training", number, time=begins - 1, **how)
    yield event("phase", number, time=begins - 0.5, phase="repeating" if again else "training")
    if again:
        yield event("phase", number, time=begins + again * STEP_S, phase="training")


def _timing(number: int, ranks: int, times: tuple[float, float], steps: int, slow: bool) -> Iterator[dict[str, Any]]:
    """What a supervisor writes of these steps, as often as it would."""
    hosts = [f"n{1 + rank // PER_HOST}" for rank in range(ranks)]
    begin, end = times
    written, now = TimingLines(number, ranks, BEGAN), begin
    while now < end:
        now = min(end, now + interval_s(now - BEGAN, ranks))
        done = round(steps * (now - begin) / (end - begin))
        for rank in range(ranks):
            written.update(rank, _beat(rank, done, SLOW_S if slow and rank == SLOW else USUAL_S), now)
        yield from written.interval(now, hosts)
    yield from written.interval(end, hosts)


def _beat(rank: int, steps: int, own_s: float) -> Alive:
    """The totals of a rank after so many steps, each rank a little faster or slower than the others."""
    own = own_s * (1 + 0.02 * math.sin(rank)) * steps
    totals = (steps, DATA_S * steps, own, STEP_S * steps - own, None)
    return Alive(steps, steps, 0.0, timing=totals)


def _metrics(begin: int, end: int, attempt: int, begins: float) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "time": begins + STEP_S * (step - begin + 1),
            "attempt": attempt,
            "loss": round(3 * math.exp(-step / 20_000) + 0.2 + 0.05 * math.sin(step * 1.7), 5),
            "accuracy": round(1 - 0.9 * math.exp(-step / 30_000) + 0.01 * math.sin(step), 5),
            "lr": 1e-3 * min(1.0, (step + 1) / 2000),
        }
        for step in range(begin, end)
    ]


def _cost(step: int) -> dict[str, Any]:
    return {"blocked_s": 0.02 + step % 7 / 1000, "durable_s": 0.4 + step % 11 / 100, "bytes": 1_200_000_000}
