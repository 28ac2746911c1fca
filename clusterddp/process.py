"""Processes on Linux: starting our modules, start times, children, death with the parent, exit handlers."""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
#: Child processes of a rank, by their command, that exit on their own after the rank: a save in progress, those of
#: multiprocessing, and torch's for shared files (``unlink_shared_tensors``).
_EXIT_ALONE = (
    *("clusterddp.checkpoint.writer", "multiprocessing.resource_tracker", "multiprocessing.forkserver"),
    "torch_shm_manager",
)
#: Seconds between two looks for a pending Ctrl-C.
_CTRL_C_CHECK_S = 0.1
#: The folder on sys.path that contains this package.
PACKAGE_FOLDER = Path(__file__).absolute().parents[1]
#: Like `python -P -m`, which requires Python 3.11. Only built-in modules are imported before.
_ISOLATED = (
    'import sys; sys.path = [*filter(None, sys.path), %s]; import runpy; runpy.run_module("%s", None, "__main__", True)'
)


def oom_kills() -> int:
    """How many processes of this machine the kernel has killed for lack of memory, in memory cgroups as well (proc(5),
    Linux 4.13). 0 if unknown."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def module_command(module: str, python: str | None = None, package: Path = PACKAGE_FOLDER) -> list[str]:
    """The start of a command that runs a module of clusterddp, with this interpreter or with ``python``.

    ``package``: the folder or zip file from which it imports clusterddp if it is not installed there.

    Like ``python -u -m MODULE``, but without the current folder on sys.path: in a folder that others can write to, such
    as /tmp, another user's ``yaml.py`` would be executed.
    """
    # The package comes last: its folder may have been the current one, or on a PYTHONPATH that has changed.
    code = _ISOLATED % (json.dumps(str(package), ensure_ascii=False), module)
    return [python or sys.executable, "-u", "-c", code]


def process_start(pid: int) -> str | None:
    """A process's start time in clock ticks since boot (proc(5), field 22). None if it does not exist or is a zombie.

    The pid and the start time together identify a process, because pids are reused.
    """
    status = _status(pid)
    return None if status is None or status[0] == "Z" else status[19]


def started_at(pid: int) -> float | None:
    """When a process started, in unix seconds, exact to a clock tick. An ``exec`` does not change it.

    It is None as for ``process_start``.
    """
    ticks = process_start(pid)
    if ticks is None:
        return None
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + int(ticks) / os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> dict[int, str]:
    """The descendants of ``pid``, children first: pids and command lines.

    Zombies, and processes that exit on their own after a rank, are left out.
    """
    processes = _processes()
    found: dict[int, str] = {}
    below = [child for child in processes.get(pid, []) if child not in _ending_alone]
    while below:
        found |= {child: _command(child) for child in sorted(below)}
        below = [grandchild for child in below for grandchild in processes.get(child, [])]
    return {child: command for child, command in found.items() if not any(name in command for name in _EXIT_ALONE)}


#: Files that were in use when their worker ended.
_shared_in_use: set[Path] = set()


def unlink_shared_tensors(pids: Iterable[int]) -> None:
    """Unlinks the files in /dev/shm through which ended processes shared tensors by name, which is torch's sharing
    strategy ``file_system``.

    torch_shm_manager does so 2 s after its last client has exited (torch 2.13), but Slurm kills it with the step.

    Files that this process or a child has mapped are left alone. torch unlinks a file when the last tensor in it is
    freed, and aborts the process if it cannot (torch 2.13, ``RefcountedMapAllocator::close``). For those that are never
    freed, there is ``unlink_shared_tensors_at_exit``.
    """
    if not (files := _shared_tensors(pids)):
        return
    try:
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in (os.getpid(), *descendants(os.getpid()))]
    except OSError:  # a child has just ended, or there is no descriptor left
        _shared_in_use.update(files)
        return
    in_use = {file for file in files if any(f"{file}\n" in text for text in maps)}
    _shared_in_use.update(in_use)
    _unlink(files - in_use)


def unlink_shared_tensors_at_exit(pids: Iterable[int]) -> None:
    """The same just before this process ends, when its tensors are not freed any more: also of files in use."""
    _unlink(_shared_tensors(pids) | _shared_in_use)


def _shared_tensors(pids: Iterable[int]) -> set[Path]:
    try:
        return {file for pid in pids for file in Path("/dev/shm").glob(f"torch_{pid}_*")}
    except OSError:  # the script may have used up its descriptors
        return set()


def _unlink(files: Iterable[Path]) -> None:
    for file in files:
        with suppress(OSError):
            file.unlink()


#: Children of this process that only this process may end.
_ending_alone: set[int] = set()


@contextmanager
def ending_alone(pid: int) -> Iterator[None]:
    """Leaves a child of this process, and its children, out of ``descendants``."""
    _ending_alone.add(pid)
    try:
        yield
    finally:
        _ending_alone.discard(pid)


def _processes() -> dict[int, list[int]]:
    """The pids of all processes of this machine except zombies, by parent, or empty if no file can be opened."""
    found: dict[int, list[int]] = {}
    try:
        entries = list(Path("/proc").glob("[0-9]*"))
    except OSError:
        return found
    for entry in entries:
        if (status := _status(int(entry.name))) and status[0] != "Z":
            found.setdefault(int(status[1]), []).append(int(entry.name))
    return found


def cpu_ticks() -> dict[int, int]:
    """The CPU time of every process of this machine so far, in clock ticks."""
    try:
        pids = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    except OSError:
        return {}
    return {pid: int(status[11]) + int(status[12]) for pid in pids if (status := _status(pid))}


def _status(pid: int) -> list[str] | None:
    """The fields of proc(5)'s stat, from the state on, or None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")  # a process may give itself any bytes as its name
        return text.rpartition(")")[2].split()
    except OSError:
        return None


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


_exit_handlers: list[Callable[[], Any]] = []


def at_exit(act: Callable[[], Any]) -> None:
    """``atexit.register`` for this process only: forked children do not call ``act``."""
    atexit.register(act)
    _exit_handlers.append(act)


def cancel_at_exit(act: Callable[[], Any]) -> None:
    """Undoes ``at_exit``."""
    atexit.unregister(act)
    if act in _exit_handlers:
        _exit_handlers.remove(act)


def drop_exit_handlers() -> None:
    """Undoes every ``at_exit``."""
    for act in list(_exit_handlers):
        cancel_at_exit(act)


os.register_at_fork(after_in_child=drop_exit_handlers)


@contextmanager
def signals_blocked(*signals: int) -> Iterator[None]:
    """Blocks signals in this thread. Processes that are started inside inherit the mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def interrupted_by(error: Exception, patience_s: float) -> Iterator[None]:
    """Raises ``error`` in the body if Ctrl-C or SIGHUP is pending for ``patience_s``, which ``signals_blocked`` blocks.

    A body that is faster is not interrupted, and its caller gets the signal afterwards. Children do not get it at all.
    No effect outside the main thread, or while a timer of the script's own is set.
    """
    interrupts, since = {signal.SIGINT, signal.SIGHUP}, math.inf

    def look(*_: object) -> None:
        nonlocal since
        if not signal.sigpending() & interrupts:
            return
        since = min(since, time.monotonic())
        if time.monotonic() >= since + patience_s:
            while signal.sigtimedwait(interrupts, 0):
                pass
            raise error

    if threading.current_thread() is not threading.main_thread() or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return
    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _CTRL_C_CHECK_S, _CTRL_C_CHECK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def process_namespace() -> str:
    """Identifies where this process's pid is valid: this boot of this machine and, in a container, this start of it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def this_process() -> str:
    """Identifies this process among all of all machines, as long as it exists, also after an ``exec``."""
    return f"{process_namespace()} {os.getpid()} {process_start(os.getpid())}"


def signal_ranks(supervisor: int, signum: int) -> None:
    """Signals the ranks of a local run but not their children, as Slurm with proctrack/cgroup does."""
    for child in _processes().get(supervisor, []):
        with suppress(ProcessLookupError):
            os.kill(child, signum)


def adopt_orphans() -> None:
    """Makes this process, instead of init, the new parent of descendants whose parent exits."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Makes the kernel KILL this process when its parent ends. A local run then leaves no processes behind."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


#: Allocations between two garbage collections while a rank imports. With Python 3.11's 700 the collections take a tenth
#: of the CPU time of importing torch 2.13.
_IMPORTING = 5000
_usual = gc.get_threshold()


def collect_rarely() -> None:
    """Collects garbage less often, until ``collect_as_usual()``, because imported modules leave no garbage."""
    gc.set_threshold(_IMPORTING, *_usual[1:])


def collect_as_usual() -> None:
    """Ends ``collect_rarely()``, unless the script has chosen its own threshold. Collections skip existing objects.

    These are mostly imported modules: with torch, some 200,000 objects. Collections that traverse them while the first
    optimizer or DDP imports torch._dynamo take a seventh of a rank's start-up CPU time (torch 2.13).
    """
    gc.freeze()
    if gc.get_threshold()[0] == _IMPORTING:
        gc.set_threshold(*_usual)


class RunningClock:
    """The seconds for which this process has been running, for a thread that calls ``look`` every ``tick_s`` seconds.

    The time during which a job was suspended (SIGSTOP, SIGCONT) does not count: at most three ticks pass per call.
    """

    def __init__(self, tick_s: float) -> None:
        self._most_s, self._looked = 3 * tick_s, time.monotonic()
        self.now = 0.0

    def look(self, counts: bool = True) -> float:
        """Adds the time since the last call to ``now``, if it ``counts``. Returns the seconds that were not added."""
        looked = time.monotonic()
        passed, self._looked = looked - self._looked, looked
        counted = min(passed, self._most_s) if counts else 0.0
        self.now += counted
        return passed - counted


#: Held across a fork, so that a child does not find it locked by a thread that it lacks.
_collecting = threading.RLock()
os.register_at_fork(before=_collecting.acquire, after_in_parent=_collecting.release, after_in_child=_collecting.release)


def current_frames() -> dict[int, FrameType]:
    """``sys._current_frames()`` without a garbage collection in it.

    In Python before 3.11.5 that call holds a lock of the interpreter that the end of a ``threading.local`` needs, too.
    A collection at that moment deadlocks the process (python/cpython#106883).
    """
    if sys.version_info >= (3, 11, 5):
        return sys._current_frames()
    with _collecting:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if enabled:
                gc.enable()
