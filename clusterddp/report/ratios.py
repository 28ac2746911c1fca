"""What a run made of its time: ETTR, goodput and lost steps, from its booked time and its history.

ETTR, the effective training time ratio, is defined as by Kokolis et al. (arXiv 2410.21680): productive time divided by
all time since the first submission. Goodput is the same for the time in which the run had its nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from clusterddp.report.booking import CATEGORIES, Booking
from clusterddp.reporter import counted, duration
from clusterddp.rundir.records import is_count

#: Steps that count, and evaluations.
PRODUCTIVE = ("training", "evaluating")
#: Meanwhile the run has no nodes.
WITHOUT_NODES = ("queued", "held", "limited", "down")
#: The least share that ``breakdown`` lists.
LEAST = 0.01


@dataclass(frozen=True)
class Spent:
    """``repeated``: steps that were made again; None if attempts did not tell where they began.

    ``goodput`` is None for a run that has had no nodes yet.
    """

    seconds: Mapping[str, float]
    total_s: float
    ettr: float
    goodput: float | None
    repeated: int | None
    provisional: bool

    def shares(self) -> dict[str, float]:
        """The share of each category that had any time, the largest first."""
        parts = {name: seconds / self.total_s for name, seconds in self.seconds.items() if seconds > 0}
        return dict(sorted(parts.items(), key=lambda part: -part[1]))

    def sentence(self) -> str:
        """``ETTR 91% of 2 h 05 min so far, goodput 97%, 12 steps repeated``."""
        of = f"{duration(self.total_s)}{' so far' if self.provisional else ''}"
        goodput = "" if self.goodput is None else f", goodput {100 * self.goodput:.0f}%"
        repeated = "repeated steps unknown" if self.repeated is None else f"{counted(self.repeated, 'step')} repeated"
        return f"ETTR {100 * self.ettr:.0f}% of {of}{goodput}, {repeated}"

    def breakdown(self) -> str:
        """``training 91%, queued 5%, importing 2%``: the categories with at least LEAST of the time."""
        parts = [f"{CATEGORIES[name]} {100 * share:.0f}%" for name, share in self.shares().items() if share >= LEAST]
        return ", ".join(parts)


def spent(booking: Booking, events: Iterable[Mapping[str, Any]]) -> Spent | None:
    """The ratios of a booked run; None if no time has passed."""
    total = booking.total_s
    if total <= 0:
        return None
    seconds = booking.seconds()
    productive = sum(seconds[name] for name in PRODUCTIVE)
    with_nodes = total - sum(seconds[name] for name in WITHOUT_NODES)
    events = list(events)
    known: list[Any] = [event.get("redone") for event in events if event["event"] in ("training", "resumed")]
    unnumbered = {event["attempt"] for event in events if event["event"] == "steps_seen"}
    unnumbered -= {event["attempt"] for event in events if event["event"] in ("training", "resumed")}
    repeated = None if len(unnumbered) > 1 else sum(steps for steps in known if is_count(steps))
    goodput = min(1.0, productive / with_nodes) if with_nodes > 0 else None
    return Spent(seconds, total, productive / total, goodput, repeated, booking.provisional)
