"""How often to save when the job says ``every: auto``: a pure function of what saves cost and what they spare."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

#: Until a save has been measured.
FIRST_S = 60.0
SHORTEST_S, LONGEST_S = 10.0, 3600.0
#: What is assumed of a run without a history: one interruption in so many seconds.
EXPECTED_S = 86400.0


def interval_s(stall_s: float, durable_s: float, between_s: float) -> float:
    """Seconds from one save to the next: sqrt(2 x stall x time between interruptions).

    The formula is Young's (1974, and Daly 2006 to first order): it makes the time lost to saves and that lost to redone
    steps together the least. ``stall_s`` is how long a save blocks training. The writer is left at least as much time
    as it took (``durable_s``) to rest.
    """
    best = math.sqrt(2 * stall_s * between_s)
    return min(LONGEST_S, max(SHORTEST_S, 2 * durable_s, best))


def between_interruptions_s(events: Iterable[Mapping[str, Any]], now: float) -> float:
    """Seconds of training from one unannounced interruption to the next, as far as the history tells.

    An interruption that was announced costs no step: those do not count. One is assumed in a day, to begin with.
    """
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    interruptions = 0
    for event in events:
        first.setdefault(event["attempt"], event["time"])
        last[event["attempt"]] = event["time"]
        interruptions += event["event"] == "resumed" and bool(event.get("redone"))
    if last:
        last[max(last)] = now
    trained = sum(last[attempt] - first[attempt] for attempt in first)
    return (trained + EXPECTED_S) / (interruptions + 1)
