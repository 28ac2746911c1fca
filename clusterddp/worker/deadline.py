"""The end of a stop's notice: a step that hangs, or takes longer than that, must not cost the save before it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

#: Seconds kept back for all ranks to leave in.
MARGIN_S = 3.0
#: A save may take this much longer than the last one, on a disk that everyone else uses, too.
CAUTION = 1.5


class Deadline:
    """Calls ``act``, once, when a stop that was asked for by a signal has not begun in time; in a thread of its own.

    ``notices``: for a signal's name, the seconds from it to a KILL. A reason without one has no deadline.
    """

    def __init__(self, notices: Mapping[str, float], act: Callable[[float], None]) -> None:
        self._notices, self._act = notices, act
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        self._over = False

    def begin(self, reason: str, last_save_s: float) -> None:
        """A stop was asked for just now. ``act`` gets the seconds that were waited."""
        notice_s = self._notices.get(reason.removeprefix("signal "))
        if notice_s is None:
            return
        # Where a save may take most of the notice, the step still gets half of it: only one that hangs takes so long.
        wait_s = max(notice_s / 2, notice_s - MARGIN_S - CAUTION * last_save_s)
        self._timer = threading.Timer(wait_s, self._act_unless_over, args=(time.monotonic(),))
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        """The stop has begun, or nobody waits for one any more."""
        with self._lock:
            self._over = True
        if self._timer is not None:
            self._timer.cancel()

    def _act_unless_over(self, begun: float) -> None:
        with self._lock:
            if not self._over:
                self._act(time.monotonic() - begun)
