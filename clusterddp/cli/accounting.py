"""What interruptions have cost a run: a pure function of its history."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from clusterddp.protocol import ATTEMPT_ENDS, RUN_ENDS
from clusterddp.rundir.records import is_count
from clusterddp.supervisor.limits import attempts_made

#: Events with which an attempt begins to make steps.
_BEGINNINGS = ("training", "resumed")
#: Events after which an attempt makes no step.
_STOPS = {*ATTEMPT_ENDS, "stopping", "rank_failed"}


@dataclass(frozen=True)
class Cost:
    """``redone``: steps that were made twice. ``total_s``: seconds from the first start to now, or to the end of the
    run; ``training_s``: those of them between the beginning of the steps and the call to stop, in every attempt."""

    redone: int
    training_s: float
    total_s: float

    def sentence(self) -> str:
        """``0 steps redone, 97% of 2 h 05 min spent training``."""
        part = 100 * self.training_s / self.total_s if self.total_s else 0.0
        steps = "1 step" if self.redone == 1 else f"{self.redone} steps"
        return f"{steps} redone, {part:.0f}% of {_duration(self.total_s)} spent training"


def cost(events: Iterable[Mapping[str, Any]], now: float) -> Cost | None:
    """The cost so far; None for a run that never started."""
    events = list(events)
    if not attempts_made(events):
        return None
    starts = [event["time"] for event in events if event["event"] in ("started", *_BEGINNINGS)]
    first, newest_start = (starts[0], starts[-1]) if starts else (events[0]["time"], events[0]["time"])
    over = [event["time"] for event in events if event["event"] in RUN_ENDS]
    last = over[-1] if over and over[-1] >= newest_start else now
    training = 0.0
    for attempt in {event["attempt"] for event in events}:
        own = [event for event in events if event["attempt"] == attempt]
        begun = next((event["time"] for event in own if event["event"] in _BEGINNINGS), None)
        if begun is not None:
            newest = attempt == max(event["attempt"] for event in events)
            end = next(
                (event["time"] for event in own if event["event"] in _STOPS), last if newest else own[-1]["time"]
            )
            training += end - begun
    known: list[Any] = [event.get("redone") for event in events if event["event"] == "resumed"]
    redone = sum(steps for steps in known if is_count(steps))
    return Cost(redone, training, last - first)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"
