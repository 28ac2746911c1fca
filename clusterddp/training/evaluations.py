"""How long a rank spends in evaluations: for the history, which says where the time of a run went."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Shorter evaluations are reported together: one in every step must not fill the history.
SHORTEST_S = 1.0


class Evaluations:
    """Adds up evaluations, and passes their seconds to ``report`` when they are worth an event."""

    def __init__(self, report: Callable[[float], None]) -> None:
        self._report = report
        self._running = 0
        self._begun = self._seconds = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """The body is an evaluation, or a part of one that is measured already."""
        if not self._running:
            self._begun = time.monotonic()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._seconds += time.monotonic() - self._begun
                if self._seconds >= SHORTEST_S:
                    self.report()

    def report(self) -> None:
        """Reports what has not been reported yet."""
        if self._seconds:
            self._report(round(self._seconds, 4))
            self._seconds = 0.0
