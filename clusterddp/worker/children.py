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
from types import ModuleType
from typing import Any

from clusterddp.import_hooks import when_imported
from clusterddp.process import process_start
from clusterddp.worker import control_channel

#: The most processes that are reported.
MOST_REPORTED = 8
#: An attribute of a process object that the script has sent a signal, and the processes that ``os.kill`` has sent one.
_SIGNALLED = "_clusterddp_signalled"
_killed: set[int] = set()

_reported = 0


def watch() -> None:
    """Reports from now on how this process's children failed."""
    _watch_popen(popen_fork.Popen)
    when_imported("multiprocessing.popen_forkserver", _watch_forkserver)
    os.kill, os.killpg = _recording(os.kill), _recording(os.killpg)
    popen: Any = subprocess.Popen
    popen.send_signal = _marking(popen.send_signal)
    if hasattr(popen, "_handle_exitstatus"):  # of CPython
        popen._handle_exitstatus = _noting(popen._handle_exitstatus, _script_of)


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


def _watch_forkserver(module: ModuleType) -> None:
    _watch_popen(module.Popen)


def _watch_popen(popen: Any) -> None:
    popen.poll = _noting(popen.poll, _name_of)
    if "_send_signal" in vars(popen):
        popen._send_signal = _marking(popen._send_signal)


def _marking(send: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(send)
    def marked(self: Any, *args: Any) -> Any:
        setattr(self, _SIGNALLED, True)
        return send(self, *args)

    return marked


def _recording(kill: Callable[[int, int], None]) -> Callable[[int, int], None]:
    @functools.wraps(kill)
    def recorded(pid: int, number: int, /) -> None:
        if number and process_start(pid) is not None:  # 0 only looks whether it exists, and a zombie has ended before
            _killed.add(pid)
        kill(pid, number)

    return recorded


def _noting(look: Callable[..., Any], name_of: Callable[[Any], str | None]) -> Callable[..., Any]:
    """``look`` learns how a process ended, and sets its ``returncode``."""

    @functools.wraps(look)
    def noted(self: Any, *args: Any, **options: Any) -> Any:
        before = self.returncode
        result = look(self, *args, **options)
        if before is None and self.returncode and not hasattr(self, _SIGNALLED) and self.pid not in _killed:
            _report(name_of(self), self.pid, self.returncode)
        return result

    return noted


def _report(name: str | None, pid: int, code: int) -> None:
    global _reported
    if name is not None and _reported < MOST_REPORTED:
        _reported += 1
        from clusterddp.history.steps import ChildDied  # few scripts need it

        control_channel.report(ChildDied(process=name, pid=pid, code=code))


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
