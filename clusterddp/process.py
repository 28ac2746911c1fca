"""Processes of this machine: how ours are started, start time, children, death with the parent, exit handlers.

For Linux.
"""

from __future__ import annotations

import atexit
import ctypes
import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
#: Processes of a rank, by their command, that end by themselves when the rank has: a save in progress, and
#: multiprocessing's own.
END_BY_THEMSELVES = ("clusterddp.checkpoint.writer", "multiprocessing.resource_tracker", "multiprocessing.forkserver")
#: The folder that Python finds this package in.
PACKAGE_FOLDER = Path(__file__).absolute().parents[1]
#: As `python -P -m`, which only Python 3.11 and later have. Nothing but built-in modules is imported before.
_ISOLATED = (
    'import sys; sys.path = [*filter(None, sys.path)%s]; import runpy; runpy.run_module("%s", None, "__main__", True)'
)


def module_command(module: str, python: str | None = None) -> list[str]:
    """The beginning of a command that runs one of clusterddp's own modules, by this interpreter or by ``python``.

    As ``python -u -m MODULE``, but modules are not searched for in the folder that it is started in: in one that
    others may write, such as /tmp, somebody else's ``yaml.py`` would be executed.
    """
    # This package's folder comes last: it may have been found in the current one, or by a PYTHONPATH that was changed.
    more = "" if python else f", {json.dumps(str(PACKAGE_FOLDER), ensure_ascii=False)}"
    return [python or sys.executable, "-u", "-c", _ISOLATED % (more, module)]


def process_start(pid: int) -> str | None:
    """When a process started, in clock ticks since boot (proc(5), field 22); None when there is none, or a zombie.

    With its number it names a process for good: numbers are used again.
    """
    status = _status(pid)
    return None if status is None or status[0] == "Z" else status[19]


def descendants(pid: int) -> dict[int, str]:
    """The processes below ``pid``, children first: their pids and command lines. Zombies are left out."""
    processes = _processes()
    found: dict[int, str] = {}
    below = processes.get(pid, [])
    while below:
        found |= {child: _command(child) for child in sorted(below)}
        below = [grandchild for child in below for grandchild in processes.get(child, [])]
    return found


def _processes() -> dict[int, list[int]]:
    """All processes of this machine that run, by their parents. None for a process that may open no more files."""
    found: dict[int, list[int]] = {}
    try:
        entries = list(Path("/proc").glob("[0-9]*"))
    except OSError:
        return found
    for entry in entries:
        if (status := _status(int(entry.name))) and status[0] != "Z":
            found.setdefault(int(status[1]), []).append(int(entry.name))
    return found


def _status(pid: int) -> list[str] | None:
    """The state, the parent's pid and the further fields of proc(5)'s stat; None when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


_exit_handlers: list[Callable[[], Any]] = []


def at_exit(act: Callable[[], Any]) -> None:
    """``atexit.register`` for this process alone: a forked child that exits does not call it."""
    atexit.register(act)
    _exit_handlers.append(act)


def cancel_at_exit(act: Callable[[], Any]) -> None:
    """Undoes ``at_exit``."""
    atexit.unregister(act)
    if act in _exit_handlers:
        _exit_handlers.remove(act)


def _drop_exit_handlers() -> None:
    for act in list(_exit_handlers):
        cancel_at_exit(act)


os.register_at_fork(after_in_child=_drop_exit_handlers)


def process_namespace() -> str:
    """Where this process's number is valid: on this machine, since it was started, in this container.

    A container that is started again, by whatever name, is another one.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def signal_ranks(supervisor: int, signum: int) -> None:
    """Signals the ranks of a local run, and nothing that they have started, as Slurm's proctrack/cgroup does."""
    for child in children(supervisor):
        with suppress(ProcessLookupError):
            os.kill(child, signum)


def children(parent: int) -> list[int]:
    """The processes that a process has started and that still run."""
    return sorted(_processes().get(parent, []))


def adopt_orphans() -> None:
    """From now on this process becomes the parent of those below it that lose theirs, instead of init."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """KILLs this process when its parent ends, however that happens: nothing of a local run is left behind."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def speak_on_a_full_disk() -> None:
    """From now on what standard output or standard error cannot take is lost, and stops nobody who prints."""
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.BufferedWriter(_Forgiving(number)), errors="backslashreplace", line_buffering=True)
        for number in (1, 2)
    )


class _Forgiving(io.RawIOBase):
    """A file descriptor that takes everything."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError:
            return memoryview(data).nbytes


class RunningClock:
    """Seconds for which this process has run, as one of its threads sees it that looks every ``tick_s`` seconds.

    A job that was suspended (SIGSTOP, SIGCONT) lived through nothing in the meantime: between two looks no more than
    three ticks pass.
    """

    def __init__(self, tick_s: float) -> None:
        self._most_s, self._looked = 3 * tick_s, time.monotonic()
        self.now = 0.0

    def look(self, counts: bool = True) -> float:
        """Moves on, unless the time since the last look does not count; returns the seconds that do not."""
        looked = time.monotonic()
        passed, self._looked = looked - self._looked, looked
        counted = min(passed, self._most_s) if counts else 0.0
        self.now += counted
        return passed - counted
