"""How well a run used its time: ETTR, goodput, lost steps and advice. Pure, from booking and history.

ETTR, the effective training time ratio, is defined as by Kokolis et al. (arXiv 2410.21680): productive time divided by
all time since the first submission. Goodput is the same for the time in which the run had its nodes. Advice is given
only where the run's own figures support it.

The figures of GPUs in ``timing.jsonl`` give a row per rank, a sentence and advice.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clusterddp.history.beginnings import Beginning, Started
from clusterddp.history.checkpoints import Checkpoint
from clusterddp.history.ends import Continues, Requeued, Resubmitted
from clusterddp.history.failures import Hung, NodeLost
from clusterddp.history.steps import StepsSeen
from clusterddp.history.stops import Overdue
from clusterddp.history.view import RunView
from clusterddp.report.booking import CATEGORIES, Booking, book, continues, idle_node_s
from clusterddp.reporter import counted, duration
from clusterddp.rundir.timing import GPU_FIGURES, GPU_LARGEST, TimedInterval
from clusterddp.slurm.run_states import Cause

if TYPE_CHECKING:
    from clusterddp.jobdef.job import Job

#: Steps that count, and evaluations.
PRODUCTIVE = ("training", "evaluating")
#: The run has no nodes in these.
WITHOUT_NODES = ("queued", "held", "limited", "down")
#: The nodes of ``Spent.idle_node_s``.
IDLE_NODES = "spare nodes, and nodes that the run left"
#: The smallest share in ``breakdown``.
LEAST = 0.01


@dataclass(frozen=True)
class Spent:
    """``repeated``: steps that were made again, or None if it is unknown where attempts began. ``at_least``: there may
    be more.

    ``goodput`` is None for a run that has had no nodes yet.
    """

    seconds: Mapping[str, float]
    total_s: float
    ettr: float
    goodput: float | None
    repeated: int | None
    provisional: bool
    idle_node_s: float = 0.0
    """Seconds times nodes of the job that had no ranks: spare ones, and those that the run had left."""
    at_least: bool = False

    def as_json(self) -> dict[str, Any]:
        """For ``status --json`` and the report."""
        return {
            "total_s": self.total_s,
            "seconds": dict(self.seconds),
            "ettr": self.ettr,
            "goodput": self.goodput,
            "repeated_steps": self.repeated,
            "idle_node_s": self.idle_node_s,
            "provisional": self.provisional,
        }

    def shares(self) -> dict[str, float]:
        """The share of each category that had any time, the largest first."""
        parts = {name: seconds / self.total_s for name, seconds in self.seconds.items() if seconds > 0}
        return dict(sorted(parts.items(), key=lambda part: -part[1]))

    def sentence(self) -> str:
        """``ETTR 91% of 2 h 05 min so far, goodput 97%, 12 steps repeated``."""
        of = f"{duration(self.total_s)}{' so far' if self.provisional else ''}"
        goodput = "" if self.goodput is None else f", goodput {100 * self.goodput:.0f}%"
        repeated = "repeated steps unknown"
        if self.repeated is not None:
            repeated = f"{'at least ' if self.at_least else ''}{counted(self.repeated, 'step')} repeated"
        return f"ETTR {100 * self.ettr:.0f}% of {of}{goodput}, {repeated}"

    def idle(self) -> str:
        """``idle nodes: 2.5 node-hours (spare nodes, and nodes that the run left)``. Empty if there were none."""
        return f"idle nodes: {node_hours(self.idle_node_s)} ({IDLE_NODES})" if self.idle_node_s else ""

    def breakdown(self) -> str:
        """``training 91%, queued 5%, importing 2%``: the categories with at least LEAST of the time."""
        parts = [f"{CATEGORIES[name]} {100 * share:.0f}%" for name, share in self.shares().items() if share >= LEAST]
        return ", ".join(parts)


def node_hours(seconds: float) -> str:
    """``2.5 node-hours``"""
    return f"{seconds / 3600:.3g} node-hours"


def spent(booking: Booking, history: RunView) -> Spent | None:
    """The ratios of a booked run, or None if no time has passed."""
    total = booking.total_s
    if total <= 0:
        return None
    seconds = booking.seconds()
    productive = sum(seconds[name] for name in PRODUCTIVE)
    with_nodes = total - sum(seconds[name] for name in WITHOUT_NODES)
    unnumbered = [one for one in history.attempts if one.has(StepsSeen) and not one.has(Beginning)]
    known = [event.redone for event in history.all(Beginning)]
    known += [attempt.unread.redone for attempt in unnumbered if attempt.unread]
    at_least = len(unnumbered) > 1
    repeated = sum(steps or 0 for steps in known) or (None if at_least else 0)
    goodput = min(1.0, productive / with_nodes) if with_nodes > 0 else None
    idle_s = idle_node_s(booking, history)
    return Spent(seconds, total, productive / total, goodput, repeated, booking.provisional, idle_s, at_least)


# --- advice

#: The smallest share of the time that a change must save, and the fewest interruptions that give a rate.
WORTH, ENOUGH = 0.01, 3
_ANNOUNCED = (Cause.PREEMPTED.value, Cause.TIME_LIMIT.value)


def advice(job: Job, booking: Booking, history: RunView, intervals: Iterable[TimedInterval] = ()) -> list[str]:
    """Advice, most general first. Empty if no change would help. ``intervals``: the run's step times."""
    of_time = [*_interval(job, booking, history), *_hold(job, booking, history), *_spare(job, booking, history)]
    return [*gpu_advice(intervals), *of_time, *_notice(job, history)]


def _interval(job: Job, booking: Booking, history: RunView) -> Iterator[str]:
    """Young (1974): the best interval is sqrt(2 x seconds blocked by a save / rate of unannounced interruptions)."""
    seconds = booking.seconds()
    trained = sum(seconds[name] for name in ("training", "repeating", "evaluating", "straggler"))
    interruptions = sum(bool(event.redone) for event in history.all(Beginning))
    saves, gaps = history.all(Checkpoint), _gaps(history)
    if job.checkpoint.auto or interruptions < ENOUGH or min(len(saves), len(gaps)) < ENOUGH:
        return
    save_s: float = statistics.median(event.blocked_s for event in saves)
    rate = interruptions / max(trained, 1.0)
    now_s = statistics.median(gaps)
    best_s = max(math.sqrt(2 * save_s / rate), 2 * statistics.median(event.durable_s for event in saves), 1.0)

    def lost(interval_s: float) -> float:
        return save_s / interval_s + rate * interval_s / 2

    if lost(now_s) - lost(best_s) >= WORTH:
        yield (
            f"checkpoint.every: {best_s:.0f}s would save about {100 * (lost(now_s) - lost(best_s)):.0f}% of the "
            f"training time. Saves are {duration(now_s)} apart, each blocks training for {save_s:.3g} s, and the run "
            f"is interrupted without notice every {duration(1 / rate)}"
        )


def _gaps(history: RunView) -> list[float]:
    """Seconds from one save to the next in the same attempt. Duplicate lines are ignored."""
    last: dict[int, float] = {}
    found = []
    for event in history.all(Checkpoint):
        if event.time > last.get(event.attempt, math.inf):
            found.append(event.time - last[event.attempt])
        last[event.attempt] = event.time
    return found


def _hold(job: Job, booking: Booking, history: RunView) -> Iterator[str]:
    """Slurm holds a job after each requeue. A new job has no hold, but waits in the queue."""
    requeued = {event.time for event in history if not isinstance(event, Resubmitted) and continues(event)}
    holds = [one.seconds for one in booking.intervals if one.category == "held" and one.begin in requeued]
    # Without a grace period, Slurm requeues the job itself under any policy.
    avoidable = job.policy != "resubmit" and history.has(Requeued)
    other = ". With `policy: resubmit`, the run continues in a new job, which is not held" if avoidable else ""
    if holds and sum(holds) >= WORTH * booking.total_s:
        percent = f"{100 * sum(holds) / booking.total_s:.0f}%"
        yield (
            f"Slurm held the run {counted(len(holds), 'time')} after a requeue, for {duration(statistics.mean(holds))} "
            f"on average, {percent} of its time. `clusterddp wait --resubmit` lifts the hold{other}"
        )


def _spare(job: Job, booking: Booking, history: RunView) -> Iterator[str]:
    """The queue after each node that was lost, of a job without spare nodes."""
    waits = [seconds for seconds in _waits_after_lost_nodes(booking, history) if seconds]
    if waits and not job.spare_nodes and sum(waits) >= WORTH * booking.total_s:
        yield (
            f"spare_nodes: 1 would have saved about {duration(sum(waits))} in the queue, where the run waited after it "
            f"lost {counted(len(waits), 'node')}"
        )


def _waits_after_lost_nodes(booking: Booking, history: RunView) -> list[float]:
    """For each job that ended because of a lost node, how long the run was then in the queue."""
    queued = {one.begin: one.seconds for one in booking.intervals if one.category == "queued"}
    ends = [end.time for end in history.all(Resubmitted) if history.attempt(end.attempt).has(NodeLost)]
    return [queued.get(end, 0.0) for end in ends]


def lost_nodes(runs: Iterable[RunView], now: float) -> dict[str, float] | None:
    """What lost nodes cost these histories, and what a spare node for each would have cost. None if they ended no job.

    Runs without a Slurm job, and those that had spare nodes, do not count.
    """
    starts = [(history, history.all(Started)) for history in runs]
    histories = [
        history
        for history, started in starts
        if any(event.job for event in started) and not any(event.spares for event in started)
    ]
    if not any(history.has(NodeLost) for history in histories):
        return None
    # What follows the records of a run is not known without Slurm, and does not count.
    bookings = [(book(history, now, state="stopped"), history) for history in histories]
    waits = [seconds for booking, history in bookings for seconds in _waits_after_lost_nodes(booking, history)]
    spare_s = sum(one.seconds for booking, _ in bookings for one in booking.intervals if one.attempt is not None)
    found = {"runs": len(histories), "jobs": len(waits), "queued_s": sum(waits), "spare_node_s": spare_s}
    return found if waits else None


def _notice(job: Job, history: RunView) -> Iterator[str]:
    """Announced stops that lost steps, because the last save did not finish or begin in time."""
    announced = [end for end in history.all(Continues) if end.cause in _ANNOUNCED]
    lost = [end.attempt for end in announced if (end.step or 0) > (end.checkpoint or 0)]
    late = sum(history.attempt(number).has(Overdue, Hung) for number in lost)
    if late:
        yield (
            f"{counted(late, 'announced stop')} lost steps, because a step did not end within the notice. The history "
            "and rank 0's log show where it was. If steps are just long, let the run stop in them with "
            "`clusterddp.stop_requested()` and `run.stop()`"
        )
    longest = max((event.durable_s for event in history.all(Checkpoint)), default=0.0)
    if len(lost) > late and longest:
        yield (
            f"{counted(len(lost) - late, 'announced stop')} lost steps, because the last save was not committed in "
            f"time. The longest save took {longest:.3g} s. Preemptions need a longer grace period than that, and time "
            f"limits a longer notice (timeouts.notice_s, {job.timeouts.notice_s:.0f} s)"
        )


#: The least share of the time in which GPUs are idle that is worth advice, and in percent that of throttling.
IDLE, THROTTLED = 0.2, 10
#: The most ranks that a sentence names.
_NAMED = 3
#: Why GPUs are idle, by the phase of a step that takes most of that time, and what helps.
_WHY_IDLE = {
    "data_s": "waiting for batches. Raise `num_workers` of the loader, or make its samples cheaper to read",
    "save_s": "while a save blocked training. Save less often (`checkpoint.every`)",
    "own_s": "between kernels. Record a profile with torch.profiler: the batch may be too small, or the "
    "script waits for the GPU in each step",
}


def gpu_rows(intervals: Iterable[TimedInterval]) -> list[dict[str, Any]]:
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


def newest_gpu_rows(intervals: Sequence[TimedInterval]) -> list[dict[str, Any]]:
    """The same of the newest interval."""
    return gpu_rows([span for span in intervals if span.gpus][-1:])


def gpus_busy(found: Sequence[Mapping[str, Any]]) -> int | None:
    """The mean percentage of the time in which the GPUs computed."""
    return _mean([(row["busy"], 1.0) for row in found if row["busy"] is not None])


def gpu_sentence(found: Sequence[Mapping[str, Any]]) -> str:
    """``71% busy, 61% of memory used, 412 W, at most 66 °C``, and which are throttled or have errors."""
    largest = {name: max((row[name] for row in found if row[name] is not None), default=None) for name in GPU_LARGEST}
    watts = _mean([(row["watts"], 1.0) for row in found if row["watts"] is not None])
    facts = [
        (gpus_busy(found), "{}% busy"),
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


def gpu_advice(intervals: Iterable[TimedInterval]) -> Iterator[str]:
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
    why = _WHY_IDLE[most if shares[most] >= idle / 2 else "own_s"]
    yield f"The GPUs were idle {100 * idle:.0f}% of the time, mostly {why}"
