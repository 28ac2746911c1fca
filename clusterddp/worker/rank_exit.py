"""How a rank's process exits: threads, children and exit handlers get a grace period, then they are ended and named.

Python waits indefinitely for non-daemonic threads, ``multiprocessing`` children and exit handlers, and a rank that
waits keeps its node allocated. A second thread therefore ends the process after a timeout.

This module also notes whether the training loop is complete, because a script may exit with code 0 in the middle of its
loop, for example from its own signal handler.
"""

from __future__ import annotations

import atexit
import inspect
import multiprocessing.util
import opcode
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import NoReturn

from clusterddp.process import (
    cancel_at_exit,
    current_frames,
    descendants,
    drop_exit_handlers,
    process_start,
    unlink_shared_tensors_at_exit,
)
from clusterddp.reporter import say, say_unlocked

#: The instructions with which Python ends a loop at ``break`` and ``return``; the second from 3.14 on.
_DROP_ITERATOR = ("POP_TOP", "POP_ITER")


@dataclass
class Loop:
    """A loop over ``run.steps()`` that has begun and is not complete.

    ``step`` returns the number of steps done, of ``steps``. ``left_at``: the code and line that left it. ``failed``:
    whether it was probably left by an exception, rather than by ``break`` or ``return``.
    """

    step: Callable[[], int]
    steps: int
    left_at: tuple[CodeType, int] | None = None
    failed: bool = False

    def leave(self) -> None:
        """Called by the loop's generator when it is closed, by ``break``, an exception, or its deletion.

        Records the line of the frame that closes it, skipping other generators such as tqdm's, because an exception
        that ends the loop passes through the same line. The frame's instruction is the one that raised, or the one that
        drops the loop's iterator. A call of the generator's ``close`` looks as if it had raised.
        """
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
            frame = frame.f_back
        self.left_at = frame.f_code, frame.f_lineno
        self.failed = opcode.opname[frame.f_code.co_code[frame.f_lasti]] not in _DROP_ITERATOR

    def ended_by(self, error: BaseException) -> bool:
        """Whether ``error`` was raised inside the loop, rather than after a ``break``."""
        places = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        return self.left_at is None or self.left_at in places


class Training:
    """The state of this process's training loops."""

    #: The newest loop, from its begin until it is complete.
    loop: Loop | None = None
    #: The reason, once ``stop_requested()`` has returned True in a script's own loop, until a loop is complete.
    stop_reason: str | None = None
    #: The script exited in its loop. Other ranks may wait in a collective for this one, which must not wait for them.
    exited_in_loop = False

    def complete_loop(self) -> None:
        """All steps of the loop are done."""
        self.loop = self.stop_reason = None


#: Seconds from the end of the script to the end of the process, for threads, children and exit handlers.
EXIT_GRACE_S = 30.0
#: Seconds from the commit of a stop's checkpoint to the end of the process, ``except`` and ``finally`` blocks included.
STOP_GRACE_S = 10.0
#: Seconds from a rank's failure to the end of its process, for exit handlers: below the time after which the supervisor
#: kills a failed rank's job step (``PEER_GRACE_S`` and ``HANG_GRACE_S`` of ``supervisor/decide.py``).
FAILURE_GRACE_S = 5.0
#: The same from an order to exit at once, below ``HANG_GRACE_S``.
DISMISSAL_GRACE_S = 2.0
#: Seconds from TERM to KILL of children. Daemonic ones get TERM when the script has ended.
KILL_AFTER_S = 1.0

_end_multiprocessing = multiprocessing.util._exit_function  # type: ignore[attr-defined]


class Exit:
    """The end of this process."""

    def __init__(self) -> None:
        self._deadline = float("inf")
        #: Held by the thread that runs the exit handlers, until the end of the process.
        self._exiting = threading.Lock()

    def within(self, grace_s: float, since: str, exit_code: int, record: Callable[[], None] = lambda: None) -> None:
        """Ends this process with ``exit_code`` in ``grace_s`` seconds, unless it has exited. The earliest deadline
        counts.

        ``since``: the start of the grace period, for the message. ``record`` is called just before the exit.
        """
        if (deadline := time.monotonic() + grace_s) >= self._deadline:
            return
        self._deadline = deadline

        def overdue() -> None:
            time.sleep(grace_s)
            try:
                say_unlocked(f"exiting {grace_s:g} s after {since}, although this is still running: {_running()}")
                record()
                end_children()
            finally:
                os._exit(exit_code)

        threading.Thread(target=overdue, name="clusterddp exit", daemon=True).start()

    def finish(self, exit_code: int, *, stopped: bool) -> NoReturn:
        """Ends this process as Python would, in bounded time and without the interpreter's finalization.

        Finalization with torch takes seconds on a busy node (2.1 s for 4 ranks on 2 cores). After a stop,
        ``multiprocessing`` gets one second: if the TERM to all processes of the step killed an idle worker of a Pool,
        its lock is never released, and the Pool would wait for it indefinitely.
        """
        self.within(EXIT_GRACE_S, "the end of the script", exit_code)
        threading._shutdown()  # type: ignore[attr-defined]
        self._exiting.acquire()
        if stopped:
            atexit.unregister(_end_multiprocessing)
            cancel_at_exit(end_daemonic)
        atexit._run_exitfuncs()
        if stopped:
            _start_multiprocessings_end().join(KILL_AFTER_S)
        exit_now(exit_code)

    def fail(self, exit_code: int, grace_s: float = FAILURE_GRACE_S) -> NoReturn:
        """Ends this process after a failure. The script's exit handlers run, because loggers and trackers write their
        last lines there.

        Does not wait for threads, and skips clusterddp's own exit handlers: they may wait for a collective that other
        ranks never join. Any thread may call it, because the main thread may wait for one, too.
        """
        self.within(grace_s, "the failure", exit_code)
        self._exiting.acquire()
        drop_exit_handlers()
        atexit.unregister(_end_multiprocessing)
        atexit._run_exitfuncs()
        ending = _start_multiprocessings_end()
        _end_and_name_children()
        ending.join(KILL_AFTER_S)
        _exit(exit_code)


def _start_multiprocessings_end() -> threading.Thread:
    """Python's exit handler of ``multiprocessing``, in a thread, because it waits for processes that may never end."""
    thread = threading.Thread(target=_end_multiprocessing, daemon=True)
    thread.start()
    return thread


def finish_child(exit_code: int) -> NoReturn:
    """Ends a forked child of a rank as Python would, without the interpreter's finalization.

    Finalization would wait indefinitely for the process group's threads, which a fork does not copy (torch 2.13: a
    plain DDP script whose forked child calls ``sys.exit``). In addition, ``multiprocessing`` would end the rank's
    daemonic processes, its Pools and loader workers, as if they were the child's.
    """
    children = multiprocessing.process._children  # type: ignore[attr-defined]
    children -= {child for child in children if child._parent_pid != os.getpid()}
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _exit(exit_code)


def exit_now(exit_code: int) -> NoReturn:
    """Ends this process and its children now."""
    _end_and_name_children()
    _exit(exit_code)


def _end_and_name_children() -> None:
    if left := end_children():
        say(f"killed child processes at exit: {_listed(left)}")


def _exit(exit_code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed by the script, or a full disk
            stream.flush()
    os._exit(exit_code)


def end_daemonic() -> None:
    """Ends daemonic ``multiprocessing`` children as Python does at exit, but KILLs those that TERM does not end.

    Python would wait for them indefinitely. DataLoader workers, for example, block TERM.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises here when a worker is killed
    multiprocessing.util._run_finalizers(0)  # type: ignore[attr-defined]  # ends Pools first: they replace workers
    daemonic = [child for child in multiprocessing.active_children() if child.daemon]
    for child in daemonic:
        child.terminate()
    deadline = time.monotonic() + KILL_AFTER_S
    for child in daemonic:
        child.join(max(0.0, deadline - time.monotonic()))
        if child.exitcode is None:
            child.kill()


def end_children() -> Mapping[int, str]:
    """Ends all descendants of this process, with TERM, then KILL, and returns them."""
    left = _children()
    alive = {pid: process_start(pid) for pid in left}
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in alive:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        deadline = time.monotonic() + KILL_AFTER_S
        while alive and time.monotonic() < deadline:
            time.sleep(0.01)
            alive = {pid: start for pid, start in alive.items() if start and process_start(pid) == start}
    unlink_shared_tensors_at_exit((os.getpid(), *left))
    return left


def _children() -> dict[int, str]:
    """The descendants of this process that must not outlive it: pids and names."""
    names = {child.pid: child.name for child in multiprocessing.active_children()}
    return {pid: names.get(pid, command[:60]) for pid, command in descendants(os.getpid()).items()}


def _running() -> str:
    """What keeps this process from exiting, for a message."""
    main = threading.main_thread()
    frames = current_frames()
    threads = [thread for thread in threading.enumerate() if not thread.daemon and thread.ident in frames]
    words = [f"thread {thread.name!r}{_place(frames.get(thread.ident or 0))}" for thread in threads if thread != main]
    if main.ident in frames and (place := _place(frames[main.ident])):
        words.insert(0, f"main thread{place}")
    if children := _children():
        words.append(_listed(children))
    return ", ".join(words) or "an exit handler"


def _place(frame: FrameType | None) -> str:
    """`` in train.py:12 (main)``: the innermost frame outside Python's library and clusterddp, if any."""
    ours = (str(Path(os.__file__).parent), str(Path(__file__).parents[1]), "<")
    while frame is not None and frame.f_code.co_filename.startswith(ours):
        frame = frame.f_back
    if frame is None:
        return ""
    return f" in {Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"


def _listed(children: Mapping[int, str]) -> str:
    return ", ".join(f"process {pid} ({name})" for pid, name in children.items())
