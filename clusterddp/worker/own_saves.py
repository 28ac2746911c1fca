"""Protects the saves of a script: a file is replaced only by a complete one, and a stop waits for a save.

``torch.save(state, "ckpt.pt")`` empties the file before it writes. A script that keeps one checkpoint and is preempted
in that moment has none. In a rank, ``torch.save`` and the ``save_file`` of safetensors therefore write to a new file on
the same file system, sync it, and rename it. Saves to file objects, devices and pipes stay as they are, and so do
``torch.jit.save`` and torch's distributed checkpoints, which have their own formats.
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import functools
import importlib
import itertools
import json
import os
import re
import secrets
import select
import shutil
import signal
import stat
import struct
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from multiprocessing import spawn
from pathlib import Path
from types import ModuleType
from typing import Any

from clusterddp import protocol
from clusterddp.import_hooks import when_imported
from clusterddp.protocol import SAVING
from clusterddp.reporter import say
from clusterddp.rundir.files import fsync_directory, link_target, names_in, symlink, unlink
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.worker import control_channel

# --- steps of a script that does not use clusterddp

#: The module that counts the steps. It is imported by name at the first step, because only then it is certain that the
#: script trains with torch in this process. It belongs to the training half, with torch.
_STEPS = "clusterddp.training.script_steps"
_handle: Any = None
#: Where a process that the script starts notes that it has made a step.
_first_step: Path | None = None


def watch_optimizers(file: Path | None = None) -> None:
    """Has torch call us after each step of any optimizer. A hook that fails is removed.

    In a process that the script starts with multiprocessing, only the first step is noted: in ``file``.
    """
    global _first_step
    _first_step = file
    when_imported("torch", _register)


def unwatch_optimizers() -> None:
    """Ends ``watch_optimizers``."""
    global _handle
    if _handle is not None:
        _handle.remove()
        _handle = None


def _register(torch: ModuleType) -> None:
    global _handle
    is_compiling = torch.compiler.is_compiling
    note: Callable[[Any], None] | None = None

    def hook(optimizer: Any, _args: Any, _options: Any) -> None:
        nonlocal note
        if is_compiling():  # torch.compile would make this part of the compiled step, or fail to compile it
            return
        try:
            note = note or importlib.import_module(_STEPS).on_optimizer_step
            note(optimizer)
        except Exception as error:
            unwatch_optimizers()
            say(f"steps are not counted in this attempt, because the optimizer hook failed: {error!r}")

    _handle = sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(hook)


def note_first_step(file: Path) -> None:
    """Has this process, which is no rank, create ``file`` after the first step of an optimizer."""

    def note(_torch: ModuleType) -> None:
        def hook(*_: Any) -> None:
            handle.remove()
            with suppress(OSError):
                file.touch()

        handle = sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(hook)

    when_imported("torch", note)


def _watch_in_child() -> None:
    unwatch_optimizers()
    if _first_step is not None:
        note_first_step(_first_step)


os.register_at_fork(after_in_child=_watch_in_child)


#: These lead to files that are already open.
_OPEN_FILES = ("/proc/", "/dev/fd/", "/dev/std")
#: The most files that are reported to the supervisor.
MOST_TOLD = 8
#: Bytes that do not fit on a full disk.
PROBE_BYTES = 1 << 20


#: Entered around each save. ``training/script_steps.py``, which times the script's steps, replaces it.
around: Callable[[], AbstractContextManager[None]] = nullcontext


def protect(run: str, attempt: int, handles_stops: Callable[[], bool], stop_signal: str | None = None) -> None:
    """Protects the saves of this process from now on.

    ``run``: the run directory. ``handles_stops``: whether a stop does not end this process at once, so that it need not
    wait. ``stop_signal``: the signal that the script expects at a stop (key ``stop``), without SIG. Then TERM and USR2
    lead to it.
    """
    if stop_signal is not None:
        _this.deferred = frozenset({signal.SIGTERM, signal.SIGUSR2, signal.Signals[f"SIG{stop_signal}"]})
    _this.records = RunDirectory(run).private.absolute()
    _this.attempt, _this.handles_stops = attempt, handles_stops
    when_imported("torch", _protect_torch)
    for name in ("safetensors.torch", "safetensors.numpy"):
        when_imported(name, _protect_safetensors)


def defer(signals: Iterable[signal.Signals]) -> None:
    """Also defers these signals until the end of a save."""
    _this.deferred |= set(signals)


def prepare_children(run: str, attempt: int, *, protect: bool, steps: bool) -> None:
    """Has processes of multiprocessing's method "spawn" protect their saves and note their first step, as scripts may
    start one per GPU."""
    command_line = spawn.get_command_line

    def with_hooks(**values: Any) -> list[str]:
        command = command_line(**values)
        if "-c" in command[:-1]:  # not of a frozen program
            place = command.index("-c") + 1
            command[place] = _IN_CHILD.format(run=run, attempt=attempt, protect=protect, steps=steps) + command[place]
        return command

    spawn.get_command_line = with_hooks


def begin_child(run: str, attempt: int, protects: bool, steps: bool) -> None:
    """In such a process, before it runs code of the script."""
    if protects:
        protect(run, attempt, lambda: False)
    if steps:
        note_first_step(RunDirectory(run).child_step_file(attempt).absolute())
    prepare_children(run, attempt, protect=protects, steps=steps)


#: If clusterddp cannot be imported, the child saves as it would elsewhere.
_IN_CHILD = """\
try:
    from clusterddp.worker.own_saves import begin_child
except ImportError:
    pass
else:
    begin_child({run!r}, {attempt}, {protect}, {steps})
"""


def _protect_torch(torch: ModuleType) -> None:
    torch.save = torch.serialization.save = protected(torch.save, "f")  # type: ignore[attr-defined]


def _protect_safetensors(module: ModuleType) -> None:
    module.save_file = protected(module.save_file, "filename")  # type: ignore[attr-defined]  # save_model calls it


def protected(save: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same function, protected. Its second argument, ``name``, is the file."""

    @functools.wraps(save)
    def save_whole(*args: Any, **options: Any) -> Any:
        path = options[name] if name in options else args[1] if len(args) > 1 else None
        if (target := _replaceable(path)) is None:
            return save(*args, **options)
        with around(), _stops_deferred():
            with _replacing(target) as temporary:
                if name in options:
                    saved = save(*args, **{**options, name: temporary})
                else:
                    saved = save(args[0], temporary, *args[2:], **options)
            _tell(target)
            return saved

    return save_whole


def _tell(target: Path) -> None:
    """Reports a save, unless a similar one was reported, because a pattern in the job may not match it."""
    kind = target.parent, target.suffix
    if kind not in _this.told and len(_this.told) < MOST_TOLD:
        _this.told.add(kind)
        control_channel.report("wrote", file=str(target))


# --- the file


class _Process:
    """The state of this process. ``records``: the folder with a link for each save in progress. ``deferred``: the
    signals that wait for the end of a save. ``unprotected``: the folders with a file whose saves are not protected.
    ``told``: the folders and suffixes of the files that were reported."""

    records, attempt = Path(), 0
    deferred = frozenset({signal.SIGTERM})
    handles_stops: Callable[[], bool] = staticmethod(lambda: False)
    unprotected: set[Path] = set()
    told: set[tuple[Path, str]] = set()


_this = _Process()


def _replaceable(path: Any) -> Path | None:
    """The regular file that a save to ``path`` writes, after symbolic links. None if it is not one, or the save will
    fail."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str) or text.endswith("/") or str(Path(text).absolute()).startswith(_OPEN_FILES):
        return None
    try:
        target = Path(text).resolve()
        if target.exists() and not (target.is_file() and os.access(target, os.W_OK)):
            return None
    except (OSError, RuntimeError):  # RuntimeError: links in a circle
        return None
    folder = target.parent
    if os.access(folder, os.W_OK | os.X_OK) and folder.is_dir():
        return target
    if target.exists() and folder not in _this.unprotected:
        _this.unprotected.add(folder)
        why = f"this user cannot create files in {folder}"
        say(f"saves to {target} are not protected against interruptions, because {why}")
    return None


#: Errors for a folder that this user may not read, or on a file system that does not sync folders.
_CANNOT_SYNC = {errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTSUP}


@contextmanager
def _replacing(target: Path) -> Iterator[str]:
    """A path with the same file name, whose file then replaces ``target``. If the block raises, the old file stays.

    The name is kept because torch writes it into the file. The new file is in a new folder beside ``target``. While
    that exists, the run directory has a link of the same name to the folder of ``target``, for ``sweep``.
    """
    beside = target.parent / f"{SAVING}{_this.attempt}-{secrets.token_hex(4)}"
    record = _this.records / beside.name
    try:
        symlink(record, beside.parent)
    except OSError as error:
        reason = f"could not record the temporary folder {beside} in {_this.records}: {error.strerror}"
        say(f"{reason}. If this rank is killed during the save, delete that folder")
    try:
        beside.mkdir()
        temporary = beside / target.name
        yield str(temporary)
        _like_old(temporary, target)
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(target)
    except BaseException as error:
        if _is_full(error, beside):
            say(
                f"not enough space to save {target}. A save needs space for the new file in addition to an existing "
                "one, which is unchanged. Free space, or set `protect_saves: false` to overwrite files in place"
            )
        raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        with suppress(OSError):
            unlink(record)
    try:
        fsync_directory(target.parent)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise


def _like_old(temporary: Path, target: Path) -> None:
    """Gives the new file the mode and, if this user may do that, the owner and the group of the old one."""
    try:
        old = target.stat()
    except FileNotFoundError:
        return
    for owner, group in ((old.st_uid, -1), (-1, old.st_gid)):
        with suppress(PermissionError):
            os.chown(temporary, owner, group)
    temporary.chmod(stat.S_IMODE(old.st_mode))


def _is_full(error: BaseException, folder: Path) -> bool:
    """Whether the disk or the quota is full, which errors of torch's and safetensors' own writers do not show."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    if not isinstance(error, Exception):
        return False
    try:
        (folder / "probe").write_bytes(bytes(PROBE_BYTES))
    except OSError as failed:
        return failed.errno in (errno.ENOSPC, errno.EDQUOT)
    return False


_RECORD = re.compile(re.escape(SAVING) + r"(\d+)-[0-9a-f]+")


def sweep(run: RunDirectory, attempt: int) -> None:
    """Removes what killed saves of earlier attempts have left, because the script may take it for a checkpoint.

    Each rank calls this before its script starts. Ranks may remove the same folder at the same time.
    """
    for name in names_in(run.private):
        match = _RECORD.fullmatch(name)
        if match is None or int(match[1]) >= attempt:
            continue
        record = run.private / name
        try:
            left = link_target(record) / name
            for file in left.iterdir():
                file.unlink(missing_ok=True)
            left.rmdir()
            unlink(record)
        except FileNotFoundError:  # another rank has removed it, or it is on the disk of another node
            pass
        except OSError as error:
            say(f"could not remove what a killed save of attempt {match[1]} has left: {error}")


# --- the stop


class _Stops:
    """Holds back the signals of a stop while any thread saves.

    A Python handler would not do, because only the main thread can install one, and a script may save in a different
    thread. Any thread can install faulthandler's handler, which leaves the script's own handlers in Python's table. It
    writes the stack of the interrupted thread into a pipe. If that is not empty, the signal came. The pipe is
    non-blocking, because many signals would fill it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._saves = 0
        #: For each signal that is held back: the ends of its pipe, to read and to write.
        self._pipes: dict[int, tuple[int, int]] = {}

    def hold(self) -> None:
        with self._lock:
            self._saves += 1
            if self._saves == 1:
                for number in _this.deferred:
                    with suppress(OSError):  # no file descriptor left
                        self._pipes[number] = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
                        faulthandler.register(number, self._pipes[number][1], all_threads=False)

    def release(self) -> None:
        """After the last save, lets the signals that came take their usual effect."""
        with self._lock:
            self._saves -= 1
            came = self._drop() if self._saves == 0 else []
        for number in came:
            os.kill(os.getpid(), number)

    def _drop(self) -> list[int]:
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
        self._drop()
        self._saves = 0


def _has_data(reader: int) -> bool:
    """Whether a pipe has data. The data stays in the pipe, because a forked child shares it."""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    return bool(poll.poll(0))


_stops = _Stops()
os.register_at_fork(after_in_child=lambda: _stops.forget())


@contextmanager
def _stops_deferred() -> Iterator[None]:
    if _this.handles_stops():
        yield
        return
    _stops.hold()
    try:
        yield
    finally:
        _stops.release()


#: linux/inotify.h: a file, or a file in a watched folder, is read, closed after a write, closed otherwise, or opened.
#: Events were lost. The event is of a folder, as at a listing.
_ACCESS, _CLOSE_WRITE, _CLOSE_NOWRITE, _OPEN, _OVERFLOW, _IS_FOLDER = 0x1, 0x8, 0x10, 0x20, 0x4000, 0x40000000
_EVENT = struct.Struct("iIII")  # followed by the name, whose length is the last number


#: Milliseconds after which the thread of a watch looks whether the watch has ended.
WATCH_MS = 1000


class ResumeWatch:
    """Whether this attempt reads the file from which it is to continue. Otherwise steps are lost unnoticed.

    ``path``: that file, or a folder: then the files in it and in its folders count. ``others``: checkpoints from which
    the script may continue instead. Linux reports each open of a file (inotify), by any process of this node and any
    library: Python's ``open``, a reader in C++ or Rust, ``mmap``. An open that writes does not count. Rank 0's node
    alone is watched. A script that opens the file without using it seems to continue, and one that opened a copy
    earlier seems not to.

    ``late``: the script has made steps without reading the file, which is reported. A script that looks for a learning
    rate first may still read it. From then on a file counts only if this attempt has not written it before.
    """

    def __init__(self, path: str, others: Sequence[str] = ()) -> None:
        self.path = path
        self._others = [other for other in others if other not in ("", path)]
        self._lock, self._descriptor = threading.Lock(), -1
        self._paths: dict[int, str] = {}
        self._opens: Counter[tuple[int, bytes]] = Counter()
        self._reported = ""
        self.late = False
        #: Those that were read. None once that is unknown.
        self._read: set[str] | None = None
        #: Those with files that were written.
        self._written: set[str] = set()
        libc = ctypes.CDLL(None)
        if hasattr(libc, "inotify_init1"):
            self._descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            return
        self._read = set()
        for whole in filter(None, (path, *self._others)):
            for part in (whole, *(str(one) for one in Path(whole).rglob("*") if one.is_dir())):
                if not os.path.lexists(part):
                    continue
                mask = _ACCESS | _CLOSE_WRITE | _CLOSE_NOWRITE | _OPEN
                watch = libc.inotify_add_watch(self._descriptor, os.fsencode(part), mask)
                if watch < 0:  # over the user's limit of watches
                    self._read = None
                    self.close()
                    return
                self._paths.setdefault(watch, whole)

    def was_opened(self) -> bool | None:
        """``is_read`` at the first call, which ends the watch."""
        self._look()
        self.close()
        return self.is_read()

    def is_read(self) -> bool | None:
        """Whether ``path`` was read before the end of the watch.

        Also False if the file was deleted, and None if that is unknown.
        """
        self._look()
        if self.path in (self._read or ()):
            return True
        return None if self._read is None and Path(self.path).exists() else False

    def opened_instead(self) -> str | None:
        """The first of the others that was read."""
        return next((other for other in self._others if other in (self._read or ())), None)

    def report_read(self, path: str) -> None:
        """Reports once that the script has read ``path``, also after ``report_unread``."""
        self._report("own_checkpoint_read", path)

    def report_unread(self) -> None:
        """Reports once that the script has not read ``path``, unless it has. The watch is late from now on."""
        self.late = True
        self._report("not_read", self.path)

    def _report(self, name: str, path: str) -> None:
        with self._lock:
            if self._reported in (name, "own_checkpoint_read"):
                return
            self._reported = name
        control_channel.report(name, file=path)

    def begin(self) -> None:
        """Reports it as soon as ``path`` is read, from a thread, as a stop may kill this process before it ends."""
        if self._descriptor >= 0 and self.path:
            threading.Thread(target=self._await_read, name="resume watch", daemon=True).start()

    def _await_read(self) -> None:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        while self._descriptor >= 0 and not self.late:
            poll.poll(WATCH_MS)
            self._look()
            if self.path in (self._read or ()) and not self.late:
                self.report_read(self.path)
                return

    def _look(self) -> None:
        with self._lock:
            try:
                data = os.read(self._descriptor, 1 << 16) if self._descriptor >= 0 else b""
            except BlockingIOError:
                data = b""
            at = 0
            while at < len(data):
                watch, mask, _, length = _EVENT.unpack_from(data, at)
                at += _EVENT.size
                self._note(watch, mask, data[at : at + length])
                at += length
            if self._read is not None:
                self._read |= {self._paths[watch] for (watch, _), opens in self._opens.items() if opens > 0}

    def _note(self, watch: int, mask: int, name: bytes) -> None:
        if mask & _OVERFLOW and self._read is not None:  # very much was read
            self._read.add(self.path)
        if mask & _IS_FOLDER or watch not in self._paths or self._read is None:
            return
        path = self._paths[watch]
        if mask & _CLOSE_WRITE:
            self._written.add(path)
        if mask & _ACCESS and not (self.late and path in self._written):
            self._read.add(path)
        if self.late:  # a file that is open may be one that is being written
            if mask & _CLOSE_NOWRITE and path not in self._written:
                self._read.add(path)
            return
        change = bool(mask & _OPEN) - bool(mask & _CLOSE_WRITE)
        self._opens[watch, name] = max(0, self._opens[watch, name] + change)

    def close(self) -> None:
        """Ends the watch."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1


#: This process's, on rank 0, until ``end_resume_watch``.
resume_watch: ResumeWatch | None = None


def watch_resume(environ: Mapping[str, str]) -> None:
    """Watches the file from which the script is to continue, from before the script starts."""
    global resume_watch
    named, *others = json.loads(environ.get(protocol.RESUMABLE, '[""]'))
    if path := environ.get(protocol.SAVED, named):
        others.append(named)
    if path or others:
        resume_watch = ResumeWatch(path, others)
        resume_watch.begin()


def end_resume_watch(*, trained: bool = True, stepped: bool = True, final: bool = True) -> bool | None:
    """Ends the watch, and reports what was read. Returns whether it is the file from which the script is to continue.
    None if that is unknown, or there was no watch.

    Args:
        trained: whether the script would have read the file by now, because it trains, or is done.
        stepped: whether it has made a step since its last read. A late read without one is no resume.
        final: otherwise, if the file was not read, that is reported and the watch continues.
    """
    global resume_watch
    if (watch := resume_watch) is None:
        return None
    read, other = watch.is_read(), watch.opened_instead()
    if watch.late and not stepped:
        read, other = False, None
    if found := watch.path if read else other:
        watch.report_read(found)
    elif read is False and watch.path and trained:
        watch.report_unread()
        if not final:
            return read
    resume_watch = None
    watch.close()
    return read
