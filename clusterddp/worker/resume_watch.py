"""Watches whether this attempt reads the file from which it is to continue. Otherwise steps are lost unnoticed."""

from __future__ import annotations

import ctypes
import json
import os
import select
import struct
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clusterddp import protocol
from clusterddp.messages.reports import Report

if TYPE_CHECKING:
    from clusterddp.history.beginnings import NotRead, OwnCheckpointRead

#: linux/inotify.h: a file, or a file in a watched folder, is read, closed after a write, closed otherwise, or opened.
#: Events were lost. The event is of a folder, as at a listing.
_ACCESS, _CLOSE_WRITE, _CLOSE_NOWRITE, _OPEN, _OVERFLOW, _IS_FOLDER = 0x1, 0x8, 0x10, 0x20, 0x4000, 0x40000000
_EVENT = struct.Struct("iIII")  # followed by the name, whose length is the last number
#: Milliseconds after which the thread of a watch looks whether the watch has ended.
WATCH_MS = 1000


class ResumeWatch:
    """Whether this attempt reads the file from which it is to continue. Otherwise steps are lost unnoticed.

    ``path``: that file, or a folder: then the files in it and in its folders count. ``report`` sends an event to the
    supervisor. ``others``: checkpoints from which the script may continue instead. Linux reports each open of a file
    (inotify), by any process of this node and any library: Python's ``open``, a reader in C++ or Rust, ``mmap``. An
    open that writes does not count. Rank 0's node alone is watched. A script that opens the file without using it seems
    to continue, and one that opened a copy earlier seems not to.

    ``late``: the script has made steps without reading the file, which is reported. A script that looks for a learning
    rate first may still read it. From then on a file counts only if this attempt has not written it before.
    ``ended``: whether ``end`` has ended the watch.
    """

    def __init__(self, path: str, report: Callable[[Report], None], others: Sequence[str] = ()) -> None:
        self.path, self._send = path, report
        self._others = [other for other in others if other not in ("", path)]
        self._lock, self._descriptor = threading.Lock(), -1
        self._paths: dict[int, str] = {}
        self._opens: Counter[tuple[int, bytes]] = Counter()
        self._reported = ""
        self.late = self.ended = False
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
            folders = (str(folder) for folder in Path(whole).rglob("*") if folder.is_dir())
            for part in (whole, *folders):
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
        from clusterddp.history.beginnings import OwnCheckpointRead

        self._report(OwnCheckpointRead(file=path))

    def report_unread(self) -> None:
        """Reports once that the script has not read ``path``, unless it has. The watch is late from now on."""
        self.late = True
        from clusterddp.history.beginnings import NotRead

        self._report(NotRead(file=self.path))

    def _report(self, event: OwnCheckpointRead | NotRead) -> None:
        with self._lock:
            if self._reported in (event.name, "own_checkpoint_read"):
                return
            self._reported = event.name
        self._send(event)

    def end(self, *, trained: bool = True, stepped: bool = True, final: bool = True) -> bool | None:
        """Ends the watch, and reports what was read. Returns whether that is ``path``. None if that is unknown, or the
        watch has ended before.

        Args:
            trained: whether the script would have read the file by now, because it trains, or is done.
            stepped: whether it has made a step since its last read. A late read without one is no resume.
            final: otherwise, if the file was not read, that is reported and the watch continues.
        """
        if self.ended:
            return None
        read, other = self.is_read(), self.opened_instead()
        if self.late and not stepped:
            read, other = False, None
        if found := self.path if read else other:
            self.report_read(found)
        elif read is False and self.path and trained:
            self.report_unread()
            if not final:
                return read
        self.ended = True
        self.close()
        return read

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


def begin(environ: Mapping[str, str], report: Callable[[Report], None]) -> ResumeWatch | None:
    """Watches the file from which the script is to continue, from before the script starts. None if there is none."""
    named, *others = json.loads(environ.get(protocol.RESUMABLE, '[""]'))
    if path := environ.get(protocol.SAVED, named):
        others.append(named)
    if not path and not others:
        return None
    watch = ResumeWatch(path, report, others)
    watch.begin()
    return watch
