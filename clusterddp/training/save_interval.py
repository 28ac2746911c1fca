"""How often to save with ``every: auto``, by the cost of a save and the time between interruptions."""

from __future__ import annotations

import math

from clusterddp.history.beginnings import Beginning
from clusterddp.history.view import RunView

#: The bounds of the interval, in seconds.
SHORTEST_S, LONGEST_S = 10.0, 3600.0
#: The assumed seconds between interruptions in a run without a history.
EXPECTED_S = 86400.0


def interval_s(stall_s: float, durable_s: float, between_s: float) -> float:
    """Seconds from one save to the next: sqrt(2 x stall x time between interruptions).

    The formula is Young's (1974; Daly 2006 to first order): it minimizes the sum of the time lost to saves and to
    repeated steps. ``stall_s`` is how long a save blocks training. The writer, which takes ``durable_s``, is idle for
    at least that time between two saves.
    """
    best = math.sqrt(2 * stall_s * between_s)
    return min(LONGEST_S, max(SHORTEST_S, 2 * durable_s, best))


def between_interruptions_s(history: RunView, now: float) -> float:
    """Seconds of training between unannounced interruptions, according to the history.

    An announced interruption costs no steps and does not count. Starts from the assumption of one a day.
    """
    interruptions = sum(bool(event.redone) for event in history.all(Beginning))
    trained = sum(attempt.lasted_s for attempt in history.attempts)
    if (newest := history.newest) is not None:
        trained += now - newest.last_time
    return (trained + EXPECTED_S) / (interruptions + 1)
