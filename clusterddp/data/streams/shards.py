"""The files of a dataset: found by patterns, in a fixed order, and read at any place.

They are read by ``pread`` rather than memory-mapped: a file that has become shorter is then an error instead of a
SIGBUS that kills the rank, and nothing but the operating system's cache keeps what was read.
"""

from __future__ import annotations

import glob
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

#: A path or a pattern, or several.
Paths: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"

#: Files that a process keeps open.
_OPEN = 64
#: The first bytes of what cannot be read at any place.
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}


@dataclass(frozen=True)
class Shard:
    """One file, as it was when it was found: ``size`` in bytes, ``mtime`` in nanoseconds."""

    path: str
    size: int
    mtime: int

    @classmethod
    def at(cls, path: str) -> Shard:
        found = Path(path).stat()
        return cls(path, found.st_size, found.st_mtime_ns)


def patterns_of(given: Paths) -> list[str]:
    """The patterns as absolute paths."""
    listed = [given] if isinstance(given, (str, os.PathLike)) else list(given)
    texts = [os.fspath(one) for one in listed]
    for text in texts:
        if "://" in text or text.startswith("pipe:"):
            raise ValueError(
                f"{text}: a shard is read at any place, which needs a file: download it, or mount its store"
            )
    return [os.path.normpath(Path(text).absolute()) for text in texts]


def found(patterns: Iterable[str]) -> list[Shard]:
    """The files that match, each once, sorted by path.

    Raises FileNotFoundError for a pattern without a file.
    """
    paths: set[str] = set()
    for pattern in patterns:
        # Unlike Path.glob, it leaves out hidden files, as a shell does: the index is one.
        named = [pattern] if Path(pattern).is_file() else glob.glob(pattern)  # noqa: PTH207
        matching = [path for path in named if Path(path).is_file()]
        if not matching:
            hint = "; {} is not expanded, use * or a list" if "{" in pattern else ""
            raise FileNotFoundError(f"no file matches {pattern}{hint}")
        paths.update(matching)
    return [Shard.at(path) for path in sorted(paths)]


def check_uncompressed(path: str, remedy: str) -> None:
    """Raises ValueError for a compressed file."""
    with open(path, "rb") as file:
        start = file.read(8)
    for magic, name in _COMPRESSED.items():
        if start.startswith(magic):
            raise ValueError(f"{path} is compressed ({name}), and can only be read from its start: {remedy}")


@contextmanager
def named(path: str) -> Iterator[None]:
    """Adds the file's path to an error of the operating system that lacks it, as one of an open file does."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, path) from None


class _File:
    """An open file. It is closed when nobody reads it any more, perhaps in another thread."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._size = os.fstat(self._descriptor).st_size

    def read(self, start: int, size: int) -> bytes:
        """Up to ``size`` bytes: fewer where the file ends before."""
        if not 0 <= start <= start + size <= self._size:  # not even tried: a wrong size may be more than the memory
            return b""
        parts = []
        while size > 0 and (part := os.pread(self._descriptor, size, start)):
            parts.append(part)
            start, size = start + len(part), size - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


class Files:
    """Reads parts of files, and keeps the last ones open. A process that gets it opens them itself."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, _File] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, path: str, start: int, size: int) -> bytes:
        """Raises ValueError if the file ends before."""
        with self._lock:
            file = self._open.pop(path, None) or _File(path)
            self._open[path] = file
            if len(self._open) > _OPEN:
                self._open.popitem(last=False)
        with named(path):
            data = file.read(start, size)
        if len(data) != size:
            raise ValueError(
                f"{path} is too short for the sample at byte {start}: it has changed since it was opened; start the "
                "script again"
            )
        return data

    def __reduce__(self) -> Any:
        return Files, ()


def folder_of(shards: list[Shard]) -> Path:
    """The folder of the first file."""
    return Path(shards[0].path).parent
