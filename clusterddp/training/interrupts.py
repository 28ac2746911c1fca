"""Signals that ask a rank to stop: noted at once wherever the main thread sits, and kept away from workers.

A Python handler runs only between bytecodes of the main thread, so not while that thread waits in a collective. The
interpreter's own C handler does run, and writes the signal's number into the wakeup pipe: a thread reads it there.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

#: Slurm's TERM (preemption, time limit, scancel) and the warning signal; USR1 is taken by NCCL.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
_END = b"\0"


@contextmanager
def blocked(loader: object = None) -> Iterator[None]:
    """Blocks the stop signals in this thread. Processes started inside inherit that: signals never reach them.

    Under proctrack/linuxproc Slurm signals every process of the step: a DataLoader worker would die of it, or, with
    the handlers it inherited, write into its parent's wakeup pipe.

    ``loader``: the one whose workers are started inside. All but forked ones need Python's resource tracker, and the
    thread that starts it gets TERM unblocked by that (seen with 3.11): it is started before.
    """
    if getattr(loader, "num_workers", 0) and _start_method(loader) != "fork":
        resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_method(loader: object) -> str:
    """How a DataLoader starts its workers."""
    context = getattr(loader, "multiprocessing_context", None) or multiprocessing
    return context.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


class SignalPipe:
    """Catches the stop signals from now on; ``listen`` then hears of all of them, also of those that came before it.

    To be made in the main thread, before the first fork.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._handlers_before = {number: signal.signal(number, _do_nothing) for number in STOP_SIGNALS}
        # The rank shim keeps USR2 blocked until here: a notice that came before is heard now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        self._thread: threading.Thread | None = None

    def listen(self, on_signal: Callable[[signal.Signals], None]) -> None:
        """Calls ``on_signal`` in a thread of its own for every stop signal, in order."""
        self._thread = threading.Thread(target=self._serve, args=(on_signal,), name="signals", daemon=True)
        self._thread.start()

    def _serve(self, on_signal: Callable[[signal.Signals], None]) -> None:
        while True:
            for number in os.read(self._read, 64):
                if number == _END[0]:
                    return
                if number in STOP_SIGNALS:
                    on_signal(signal.Signals(number))

    def close(self, *, restore_handlers: bool) -> None:
        """Stops listening. With ``restore_handlers`` off, the signals stay without effect: the process is ending."""
        signal.set_wakeup_fd(self._wakeup_before)
        if restore_handlers:
            for number, handler in self._handlers_before.items():
                signal.signal(number, handler)
        os.write(self._write, _END)
        if self._thread is not None:
            self._thread.join(timeout=5)
        os.close(self._write)
        os.close(self._read)


def _do_nothing(number: int, frame: object) -> None:
    """The handler: the interpreter has written the number into the pipe already."""
