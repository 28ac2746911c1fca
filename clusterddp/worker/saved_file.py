"""Whether this attempt opens the file that the script saved at its last stop: otherwise its steps are lost unnoticed.

Linux reports each open of the file (inotify), by any process of this node and any library: Python's ``open``, a reader
in C++ or Rust, ``mmap``. Rank 0's node alone is watched. A script that looks at the file without using it looks as if
it continued, and one that opens a copy of the file as if it did not.
"""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

#: linux/inotify.h: a file, or a file in a watched folder, is opened; the opened one is a folder, as for a listing.
_OPEN, _IS_FOLDER = 0x20, 0x40000000
_EVENT = struct.Struct("iIII")  # followed by the name, of as many bytes as the last number says


class SavedFile:
    """Watches a file, or the files in a folder and in its folders, from its creation on."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor = -1
        self._opened: bool | None = None
        libc = ctypes.CDLL(None)
        if not Path(path).exists() or not hasattr(libc, "inotify_init1"):
            return
        self._descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        for folder in (path, *(str(one) for one in Path(path).rglob("*") if one.is_dir())):
            if libc.inotify_add_watch(self._descriptor, os.fsencode(folder), _OPEN) < 0:
                self._close()  # a user may have only so many watches: nothing is known
                return

    def was_opened(self) -> bool | None:
        """Whether the file was opened before the first call, which ends the watch.

        False, too, if it is gone, and None if that is not known.
        """
        if self._opened is None and self._descriptor >= 0:
            try:
                data = os.read(self._descriptor, 1 << 16)
            except BlockingIOError:
                data = b""
            self._close()
            self._opened = any(mask & _OPEN and not mask & _IS_FOLDER for mask in _masks(data))
        return self._opened if Path(self.path).exists() else False

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def _masks(data: bytes) -> list[int]:
    masks, at = [], 0
    while at < len(data):
        _, mask, _, length = _EVENT.unpack_from(data, at)
        masks.append(mask)
        at += _EVENT.size + length
    return masks


#: The one of this process, set by ``rank.py`` on rank 0 before the script starts.
current: SavedFile | None = None
