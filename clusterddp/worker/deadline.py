"""The deadline of a stop: if a step hangs, or outlasts the notice, the newest checkpoint must still be saved."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

#: Seconds reserved for all ranks to exit.
MARGIN_S = 3.0
#: How much longer than the last one a save may take, on a shared disk.
CAUTION = 1.5


class Deadline:
    """Calls ``act`` once, in a timer thread, if a requested stop has not begun in time.

    ``notices``: seconds from each reason for a stop to the KILL. A reason that is not listed has no deadline. Of
    several deadlines the nearest counts.
    """

    def __init__(self, notices: Mapping[str, float], act: Callable[[float], None]) -> None:
        self._notices, self._act = notices, act
        self._timers: list[threading.Timer] = []
        self._lock = threading.Lock()
        self._over = False

    def begin(self, reason: str, last_save_s: float) -> None:
        """A stop has been requested, perhaps not the first. ``act`` is called with the seconds since then."""
        if (notice_s := self._notices.get(reason.removeprefix("signal "))) is None:
            return
        # If a save may take most of the notice, the step still gets half of it: only one that hangs takes so long.
        wait_s = max(notice_s / 2, notice_s - MARGIN_S - CAUTION * last_save_s)
        timer = threading.Timer(wait_s, self._act_unless_over, args=(time.monotonic(),))
        timer.daemon = True
        with self._lock:
            if not self._over:
                self._timers.append(timer)
                timer.start()

    def end(self) -> None:
        """The stop has begun, or is no longer requested."""
        with self._lock:
            self._over = True
        for timer in self._timers:
            timer.cancel()

    def _act_unless_over(self, begun: float) -> None:
        with self._lock:
            if not self._over:
                self._over = True
                self._act(time.monotonic() - begun)
