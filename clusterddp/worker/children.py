"""Processes that a script starts itself, such as one per GPU: how they end.

Many scripts ignore how such a process ended, and exit with code 0 although it was killed. Each one that failed is
therefore reported, unless the script has ended it. Processes of ``multiprocessing`` are watched, except daemonic ones,
which are helpers such as a loader's workers, and Python scripts started with ``subprocess``.
"""

from __future__ import annotations

import functools
import multiprocessing.util
import os
import subprocess
import threading
import time
from collections.abc import Callable
from multiprocessing import popen_fork
from multiprocessing.process import BaseProcess
from pathlib import Path, PurePath
from typing import Any

from clusterddp.import_hooks import when_imported
from clusterddp.messages.reports import Report
from clusterddp.process import process_start

#: The most processes that are reported.
MOST_REPORTED = 8
#: An attribute of a process object that the script has sent a signal.
_SIGNALLED = "_clusterddp_signalled"


class ChildWatch:
    """Reports how this process's children failed."""

    def __init__(self, report: Callable[[Report], None]) -> None:
        self._send, self._reported = report, 0
        #: The processes that ``os.kill`` has sent a signal.
        self._killed: set[int] = set()

    def begin(self) -> None:
        """Starts to watch. Called once."""
        self._watch_popen(popen_fork.Popen)
        when_imported("multiprocessing.popen_forkserver", lambda module: self._watch_popen(module.Popen))
        os.kill, os.killpg = self._recording(os.kill), self._recording(os.killpg)
        popen: Any = subprocess.Popen
        popen.send_signal = _marking(popen.send_signal)
        if hasattr(popen, "_handle_exitstatus"):  # of CPython
            popen._handle_exitstatus = self._noting(popen._handle_exitstatus, _script_of)

    def _watch_popen(self, popen: Any) -> None:
        popen.poll = self._noting(popen.poll, _name_of)
        if "_send_signal" in vars(popen):
            popen._send_signal = _marking(popen._send_signal)

    def _recording(self, kill: Callable[[int, int], None]) -> Callable[[int, int], None]:
        @functools.wraps(kill)
        def recorded(pid: int, number: int, /) -> None:
            if number and process_start(pid) is not None:  # 0 only looks whether it exists, and a zombie has ended
                self._killed.add(pid)
            kill(pid, number)

        return recorded

    def _noting(self, look: Callable[..., Any], name_of: Callable[[Any], str | None]) -> Callable[..., Any]:
        """``look`` learns how a process ended, and sets its ``returncode``."""

        @functools.wraps(look)
        def noted(popen: Any, *args: Any, **options: Any) -> Any:
            before = popen.returncode
            result = look(popen, *args, **options)
            if before is None and popen.returncode and not hasattr(popen, _SIGNALLED) and popen.pid not in self._killed:
                self._report(name_of(popen), popen.pid, popen.returncode)
            return result

        return noted

    def _report(self, name: str | None, pid: int, code: int) -> None:
        if name is not None and self._reported < MOST_REPORTED:
            self._reported += 1
            from clusterddp.history.steps import ChildDied  # few scripts need it

            self._send(ChildDied(process=name, pid=pid, code=code))


def wait_for_trainers(step_file: Path, patience_s: float) -> None:
    """Waits for the script's processes that still run when its main module has ended, as Python does.

    Python waits for them without a limit, but one that never trains must not keep the nodes: if ``step_file`` does not
    appear, which shows that one has trained, the wait ends after ``patience_s`` seconds.
    """
    deadline = time.monotonic() + patience_s
    while running := _awaited():
        running[0].join(1)
        if time.monotonic() > deadline and not step_file.exists():
            return


def _awaited() -> list[BaseProcess]:
    """The children that Python waits for at exit, without those that it ends there: the servers of ``Manager`` objects
    and the idle workers of executors, which do not end before."""
    finalizers = multiprocessing.util._finalizer_registry.values()  # type: ignore[attr-defined]
    ended = [argument for finalizer in finalizers for argument in finalizer._args or ()]
    for thread in threading.enumerate():
        if type(thread).__name__ == "_ExecutorManagerThread" and not getattr(thread, "pending_work_items", None):
            ended += (getattr(thread, "processes", None) or {}).values()
    ids = set(map(id, ended))
    return [child for child in multiprocessing.active_children() if not child.daemon and id(child) not in ids]


def _marking(send: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(send)
    def marked(self: Any, *args: Any) -> Any:
        setattr(self, _SIGNALLED, True)
        return send(self, *args)

    return marked


def _name_of(popen: Any) -> str | None:
    """The name of a process of ``multiprocessing`` that is not daemonic."""
    children = multiprocessing.process._children  # type: ignore[attr-defined]
    child = next((child for child in children if getattr(child, "_popen", None) is popen), None)
    return None if child is None or child.daemon else str(child.name)


def _script_of(popen: Any) -> str | None:
    """The Python script that a process of ``subprocess`` runs, if it does."""
    words = popen.args if isinstance(popen.args, (list, tuple)) else [popen.args]
    program, *more = (str(word) for word in words)
    script = next((word for word in more if word.endswith(".py")), None)
    return script if PurePath(program).name.startswith("python") else None
