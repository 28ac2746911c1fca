"""Holds back the signals of a stop while any thread saves."""

from __future__ import annotations

import faulthandler
import itertools
import os
import select
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress


class DeferredStops:
    """The signals of a stop that this process holds back. ``handles_stops``: whether a stop does not end this process
    at once, so that it need not wait.

    A Python handler would not do, because only the main thread can install one, and a script may save in a different
    thread. Any thread can install faulthandler's handler, which leaves the script's own handlers in Python's table. It
    writes the stack of the interrupted thread into a pipe. If that is not empty, the signal came. The pipe is
    non-blocking, because many signals would fill it.
    """

    def __init__(self) -> None:
        self.signals = frozenset({signal.SIGTERM})
        self.handles_stops: Callable[[], bool] = lambda: False
        self._lock = threading.Lock()
        self._saves = 0
        #: For each signal that is held back: the ends of its pipe, to read and to write.
        self._pipes: dict[int, tuple[int, int]] = {}

    def also(self, signals: Iterable[signal.Signals]) -> None:
        """Holds these signals back, too."""
        self.signals |= set(signals)

    @contextmanager
    def during_save(self) -> Iterator[None]:
        """Holds the signals back in this block. Those that came take their usual effect once no thread saves."""
        if self.handles_stops():
            yield
            return
        self._begin_save()
        try:
            yield
        finally:
            self._end_save()

    def _begin_save(self) -> None:
        with self._lock:
            self._saves += 1
            if self._saves == 1:
                for number in self.signals:
                    with suppress(OSError):  # no file descriptor left
                        self._pipes[number] = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
                        faulthandler.register(number, self._pipes[number][1], all_threads=False)

    def _end_save(self) -> None:
        with self._lock:
            self._saves -= 1
            came = self._let_through() if self._saves == 0 else []
        for number in came:
            os.kill(os.getpid(), number)

    def _let_through(self) -> list[int]:
        """Ends the deferral. Returns the signals that came."""
        for number in self._pipes:
            faulthandler.unregister(number)
        came = [number for number, (reader, _) in self._pipes.items() if _has_data(reader)]
        for descriptor in itertools.chain(*self._pipes.values()):
            os.close(descriptor)
        self._pipes.clear()
        return came

    def forget(self) -> None:
        """In a forked child, which has no save in progress."""
        self._lock = threading.Lock()
        self._let_through()
        self._saves = 0


def _has_data(reader: int) -> bool:
    """Whether a pipe has data. The data stays in the pipe, because a forked child shares it."""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    return bool(poll.poll(0))
