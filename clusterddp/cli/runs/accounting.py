"""What interruptions cost a run, in repeated steps and time: a pure function of its history."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from clusterddp.protocol import ATTEMPT_ENDS, RUN_ENDS
from clusterddp.reporter import counted, duration
from clusterddp.rundir.records import is_count
from clusterddp.supervisor.limits import attempts_made

#: Events with which an attempt begins to train.
_BEGINNINGS = ("training", "resumed")
#: Events after which an attempt trains no further step.
_STOPS = {*ATTEMPT_ENDS, "stopping", "rank_failed"}


@dataclass(frozen=True)
class Cost:
    """``repeated``: steps that were trained again. ``total_s``: seconds from the first start to now, or to the end of
    the run. ``training_s``: the part of it in which attempts trained, from the first step to the request to stop."""

    repeated: int
    training_s: float
    total_s: float

    def sentence(self) -> str:
        """``0 steps repeated, 97% of 2 h 05 min spent training``."""
        part = 100 * self.training_s / self.total_s if self.total_s else 0.0
        return f"{counted(self.repeated, 'step')} repeated, {part:.0f}% of {duration(self.total_s)} spent training"


def cost(events: Iterable[Mapping[str, Any]], now: float) -> Cost | None:
    """The cost so far; None for a run that has not started."""
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
            stops = [event["time"] for event in own if event["event"] in _STOPS]
            training += next(iter(stops), last if newest else own[-1]["time"]) - begun
    known: list[Any] = [event.get("redone") for event in events if event["event"] == "resumed"]
    repeated = sum(steps for steps in known if is_count(steps))
    return Cost(repeated, training, last - first)
