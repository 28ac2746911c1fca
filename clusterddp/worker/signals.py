"""Stop signals of a rank: detected at once, even while the main thread is in a collective, and in this process only.

A Python signal handler runs only between bytecodes of the main thread, so not during a collective. The interpreter's C
handler does run, and writes the signal number to the wakeup pipe, where a thread reads it.

Forked children inherit none of this: TERM has the action that it had before ``init()``, and USR2 is ignored. Under
proctrack/linuxproc Slurm sends both to every process of the step.

A script that does not use clusterddp has no ``SignalPipe``. If its job names the signal that it expects at a stop,
``ScriptSignal`` turns every notice into that signal.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal.getsignal takes 1.5 us
import multiprocessing
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from clusterddp.process import signals_blocked
from clusterddp.reporter import say_unlocked

#: Slurm's TERM (preemption, time limit, scancel) and the warning signal; USR1 is taken by NCCL.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
#: After this many checks the wakeup descriptor is also checked, which takes 1.5 us. Handlers take 0.1 us.
_WAKEUP_CHECKS = 64
_TERM, _USR2 = map(int, STOP_SIGNALS)
_END = b"\0"


@contextmanager
def blocked(loader: object = None) -> Iterator[None]:
    """Blocks the stop signals in this thread. Processes that are started inside inherit the mask.

    For DataLoader workers. A TERM to all processes of the step would kill them, because torch installs a TERM handler
    in them, and that raises in the rank before it can save. Only a mask that is set before they start prevents that
    under every start method.

    ``loader``: the one whose workers are started inside. Workers that are not forked need Python's resource tracker,
    whose start unblocks TERM in the calling thread (Python 3.11), so it is started before.
    """
    if getattr(loader, "num_workers", 0) and start_method(loader) != "fork":
        from multiprocessing import resource_tracker  # few scripts need it

        resource_tracker.ensure_running()
    shielded, _thread.shielded = _thread.shielded, True
    try:
        with signals_blocked(*STOP_SIGNALS):
            yield
    finally:
        _thread.shielded = shielded


def start_method(loader: object) -> str:
    """The start method of a DataLoader's workers."""
    context = getattr(loader, "multiprocessing_context", None) or multiprocessing
    return context.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def _do_nothing(number: int, _: object) -> None:
    """The handler of a process that is ending, and the default for ``on_replaced``."""


class SignalPipe:
    """Catches the stop signals from its construction on. ``listen`` receives all of them, in order.

    Construct it in the main thread. USR2 is blocked in all threads except the listening one: programs that the script
    starts inherit the mask, so that a USR2 to all processes of the step does not kill them.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._handler = self._note  # a bound method is a new object each time; this one is compared by identity
        self._handlers_before = {number: signal.signal(number, self._handler) for number in STOP_SIGNALS}
        self._thread: threading.Thread | None = None
        self._replaced: set[signal.Signals] = set()
        self._on_replaced: Callable[[signal.Signals, object], None] = _do_nothing
        self._checks = 0
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def listen(
        self,
        on_signal: Callable[[signal.Signals], None],
        on_replaced: Callable[[signal.Signals, object], None] = _do_nothing,
    ) -> None:
        """Starts a thread that calls ``on_signal`` for every stop signal, in order.

        ``check`` calls ``on_replaced`` with a signal and the handler that the script has installed for it.
        """
        self._on_replaced = on_replaced
        self._thread = threading.Thread(target=self._serve, args=(on_signal,), name="signals", daemon=True)
        self._thread.start()

    def _serve(self, on_signal: Callable[[signal.Signals], None]) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
        while True:
            for number in os.read(self._read, 64):
                if number == _END[0]:
                    return
                if number in STOP_SIGNALS:
                    on_signal(signal.Signals(number))

    def _note(self, number: int, _frame: object) -> None:
        """The handler. The interpreter has already written to the pipe, unless the script replaced the wakeup fd."""
        wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if wakeup != self._write:
            if wakeup != -1:  # that of a running asyncio or trio loop
                signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
            with suppress(BlockingIOError):
                os.write(self._write, bytes([number]))

    def check(self) -> None:
        """Checks, at each step boundary in the main thread, that the handlers are still installed. Takes 0.1 us
        in a tight loop, 3 to 6 us after a step that has displaced the CPU caches.

        A default action or SIG_IGN is replaced by our handler again: asyncio restores the default when it ends. A
        handler of the script is kept and reported once.
        """
        self._checks += 1
        handler = self._handler
        if _signal.getsignal(_TERM) is not handler or _signal.getsignal(_USR2) is not handler:
            self._check_handlers()
        if self._checks % _WAKEUP_CHECKS == 0:
            wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            if wakeup not in (self._write, -1):
                signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)

    def _check_handlers(self) -> None:
        for number in STOP_SIGNALS:
            installed = signal.getsignal(number)
            if installed in (signal.SIG_DFL, signal.SIG_IGN, None):
                signal.signal(number, self._handler)
            elif installed is not self._handler and number not in self._replaced:
                self._replaced.add(number)
                self._on_replaced(number, installed)

    def close(self, *, restore_handlers: bool) -> None:
        """Stops listening. Without ``restore_handlers`` the signals are ignored from now on, as the process is
        ending."""
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._handlers_before.items():
            if _signal.getsignal(number) is self._handler:
                signal.signal(number, handler if restore_handlers else _do_nothing)
        os.write(self._write, _END)
        if self._thread is not None:
            self._thread.join(timeout=5)
        os.close(self._write)
        os.close(self._read)
        if signal.SIGUSR2 not in self._mask_before:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})

    def forget(self) -> None:
        """In a forked child: restores handlers and wakeup fd, except those that the script has changed since."""
        wakeup = signal.set_wakeup_fd(-1)
        with suppress(ValueError, OSError):  # the descriptor has been closed
            signal.set_wakeup_fd(self._wakeup_before if wakeup == self._write else wakeup)
        for number, before in self._handlers_before.items():
            if _signal.getsignal(number) is self._handler:
                unhandled = number == signal.SIGUSR2 and before is signal.SIG_DFL
                signal.signal(number, signal.SIG_IGN if unhandled else before)
        os.close(self._write)
        os.close(self._read)


class ScriptSignal:
    """The signal that a script which does not use clusterddp expects at a stop: ``stop: {signal: USR1}``.

    The script's handler for this signal runs once, for any announcement of the stop: a TERM or USR2 of Slurm, an order
    of the supervisor, or the signal itself. TERM and USR2 have no other effect, so a preemption does not end the rank
    before it has saved. If the script has no handler for the signal yet, the signal has its usual action.

    For that, ``signal.signal`` only notes what the script installs for these signals. Handlers that C code installs are
    not noticed. Construct it in the main thread. ``on_signal`` gets each signal, in a separate thread.
    """

    def __init__(self, name: str, on_signal: Callable[[signal.Signals], None]) -> None:
        self.number = signal.Signals[f"SIG{name}"]
        #: Whether the script's handler has been called.
        self.delivered = False
        self._released = False
        self._caught = (*STOP_SIGNALS, *({self.number} - set(STOP_SIGNALS)))
        self._install, self._installed = signal.signal, signal.getsignal
        usual = {signal.SIGINT: signal.default_int_handler}
        self._handlers: dict[int, Any] = {number: usual.get(number, signal.SIG_DFL) for number in self._caught}
        self._seen: queue.SimpleQueue[signal.Signals] = queue.SimpleQueue()  # which a handler may use
        threading.Thread(target=self._tell, args=(on_signal,), name="stop signal", daemon=True).start()
        for number in self._caught:
            signal.signal(number, self._catch)
        signal.signal, signal.getsignal = self._note, self._noted  # type: ignore[assignment]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._caught)

    def send(self) -> None:
        """Sends it to this process, unless its handler has run. From any thread."""
        if not self.delivered:
            os.kill(os.getpid(), self.number)

    def _tell(self, on_signal: Callable[[signal.Signals], None]) -> None:
        while True:
            on_signal(self._seen.get())

    def _catch(self, number: int, frame: Any) -> None:
        """The handler of all signals that are caught."""
        self._seen.put(signal.Signals(number))
        if number != self.number:
            self.send()
            return
        if self.delivered:
            return
        self.delivered = True
        handler = self._handlers[number]
        if callable(handler):
            handler(number, frame)
        elif handler != signal.SIG_IGN:
            say_unlocked(f"ending the script, because it must stop and has no handler for {self.number.name}")
            self._install(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _note(self, number: int, handler: Any) -> Any:
        """Replaces ``signal.signal``, and raises the same errors."""
        if number not in self._handlers or self._released:
            return self._install(number, handler)
        with signals_blocked(*self._caught):
            self._install(number, handler)
            self._install(number, self._catch)
        before, self._handlers[number] = self._handlers[number], handler
        return before

    def _noted(self, number: int) -> Any:
        """Replaces ``signal.getsignal``."""
        return self._handlers[number] if number in self._handlers else self._installed(number)

    def release(self) -> None:
        """Stops catching: the signals get the handlers that the script has installed, and an unhandled USR2 is ignored.
        The script turned out to use clusterddp, or this is a forked child."""
        self._released = True
        signal.signal, signal.getsignal = self._install, self._installed
        for number, handler in self._handlers.items():
            unhandled = number == signal.SIGUSR2 and handler == signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN if unhandled else handler)


class StopSignals:
    """The stop signals of this process, which go to clusterddp (``catch``), the script (``expect``), or neither."""

    def __init__(self) -> None:
        self._pipe: SignalPipe | None = None
        #: None if the job names no signal, or the script uses clusterddp.
        self.of_script: ScriptSignal | None = None

    def catch(self) -> SignalPipe:
        """Catches the signals from now on. Called in the main thread."""
        if self.of_script is not None:
            self.of_script.release()
            self.of_script = None
        self._pipe = SignalPipe()
        return self._pipe

    def close(self, *, restore_handlers: bool) -> None:
        """Ends ``catch``. ``restore_handlers``: as for ``SignalPipe.close``."""
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe.close(restore_handlers=restore_handlers)

    def expect(self, name: str, on_signal: Callable[[signal.Signals], None]) -> ScriptSignal:
        """Turns the signals into the one that the script expects (``ScriptSignal``)."""
        self.of_script = ScriptSignal(name, on_signal)
        return self.of_script

    def before_fork(self) -> None:
        """Blocks the signals, so that none reaches the child before it has closed the pipe of this process."""
        if self._pipe is not None:
            _thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def after_fork(self) -> None:
        """Unblocks the signals in this process, the parent."""
        mask, _thread.mask = _thread.mask, None
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def in_forked_child(self) -> None:
        """Gives the child the signals as they were before ``catch`` or ``expect``."""
        mask, _thread.mask = _thread.mask, None
        if self.of_script is not None:
            if _forked_by_loader():  # its death would raise in the rank while that saves
                signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            self.of_script.release()
            self.of_script = None
        if mask is not None:
            pipe, self._pipe = self._pipe, None
            if pipe is not None:
                pipe.forget()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask if _thread.shielded else mask - {signal.SIGUSR2})
        # One from before ``clusterddp.init()`` does not inherit that USR2 is blocked.
        if signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})


def described(handler: object) -> str:
    """A handler's name and source line, for a message."""
    code = getattr(handler, "__code__", None)
    name = getattr(handler, "__qualname__", None) or repr(handler)
    return f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else name


class _Thread(threading.local):
    """``mask``: this thread's signal mask while it forks. ``shielded``: its children keep the stop signals blocked."""

    mask: set[Any] | None = None
    shielded = False


_thread = _Thread()


def _forked_by_loader() -> bool:
    """Whether this process is a worker of torch's DataLoader."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith("torch/utils/data/dataloader.py"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
