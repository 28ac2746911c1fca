"""The shards of a dataset: its files, and an index of the samples in them.

The files are found by patterns, in a fixed order, and read at any place by ``pread``. They are not memory-mapped, so
that a file that has become shorter is an error instead of a SIGBUS that kills the rank, and only the operating system's
cache keeps their contents.

The index has the places of all samples. It is built once, kept in a file, and memory-mapped by each process. The file
has a row (start, size) of two 64-bit numbers per sample, shard after shard, then a JSON object that describes the
shards, and at last the length and checksum of that object. It is complete or absent. If a shard's size or time of
modification differs from the record, or shards were added or removed, the index is rebuilt, and only the changed shards
are read.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import struct
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO, Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt

from clusterddp.reporter import counted, say
from clusterddp.rundir.files import replacing

#: A path or a pattern, or several.
Paths: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"

#: Files that a process keeps open.
_OPEN = 64
#: The first bytes of files that cannot be read at any place.
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
                f"{text}: a shard must be a local file, because it is read at arbitrary positions. Download it, or "
                "mount its store"
            )
    return [os.path.normpath(Path(text).absolute()) for text in texts]


def found(patterns: Iterable[str]) -> list[Shard]:
    """The files that match, each once, sorted by path.

    Raises FileNotFoundError for a pattern without a file.
    """
    paths: set[str] = set()
    for pattern in patterns:
        # Unlike Path.glob, it leaves out hidden files, such as the index, as a shell does.
        named = [pattern] if Path(pattern).is_file() else glob.glob(pattern)  # noqa: PTH207
        matching = [path for path in named if Path(path).is_file()]
        if not matching:
            hint = ". {} is not expanded. Use * or a list" if "{" in pattern else ""
            raise FileNotFoundError(f"no file matches {pattern}{hint}")
        paths.update(matching)
    return [Shard.at(path) for path in sorted(paths)]


def check_uncompressed(path: str, remedy: str) -> None:
    """Raises ValueError for a compressed file."""
    with open(path, "rb") as file:
        start = file.read(8)
    for magic, name in _COMPRESSED.items():
        if start.startswith(magic):
            raise ValueError(f"{path} is compressed ({name}), and can only be read from its start. {remedy}")


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
    """An open file, which is closed once no thread reads it."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._size = os.fstat(self._descriptor).st_size

    def read(self, start: int, size: int) -> bytes:
        """Up to ``size`` bytes, fewer if the file ends before."""
        if not 0 <= start <= start + size <= self._size:  # not tried, because a wrong size may exceed the memory
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
                f"{path} is too short for the sample at byte {start}, so it has changed since it was opened. "
                "Restart the script"
            )
        return data

    def __reduce__(self) -> Any:
        return Files, ()


def folder_of(shards: list[Shard]) -> Path:
    """The folder of the first file."""
    return Path(shards[0].path).parent


Rows: TypeAlias = "npt.NDArray[np.int64]"
#: Finds the rows of a shard, piece by piece.
Scan: TypeAlias = Callable[[str], Iterator[Rows]]

#: Length and CRC of the description.
_TAIL = struct.Struct("<QI4s")
_MAGIC = b"cdx1"
#: Shards that are read at the same time, and bytes of the rows of each that are kept in memory meanwhile.
_AT_ONCE, _IN_MEMORY = 8, 1 << 20


@dataclass(frozen=True)
class _Entry:
    """A shard in the index."""

    shard: Shard
    samples: int


@dataclass(frozen=True)
class _Found:
    """The contents of an index file."""

    entries: list[_Entry]
    rows: Rows
    tail: bytes

    @property
    def shards(self) -> list[Shard]:
        return [entry.shard for entry in self.entries]


@dataclass(frozen=True)
class Index:
    """``counts``: samples per shard. ``rows`` is memory-mapped. ``tail``: its end, which differs with the shards."""

    path: Path
    counts: list[int]
    rows: Rows
    tail: bytes


def index_place(folder: Path, kind: str, patterns: list[str]) -> Path:
    """The path of the index: a name for each dataset, which does not match patterns of shards."""
    relative = [os.path.relpath(pattern, folder) for pattern in patterns]
    name = hashlib.blake2b(json.dumps([kind, relative]).encode(), digest_size=6).hexdigest()
    return folder / f".clusterddp-{kind}-{name}.index"


def index_of(path: Path, shards: list[Shard], scan: Scan) -> Index:
    """The index of these shards, which is built if there is none or it does not fit.

    Raises the errors of ``scan``, and OSError if the file cannot be written.
    """
    found = _read(path)
    if found is None or found.shards != shards:
        _build(path, shards, scan, found)
        found = _read(path)
        if found is None or found.shards != shards:
            raise ValueError(
                f"{path}: shards changed while their index was being built. Restart the script when they are complete"
            )
    return Index(path, [entry.samples for entry in found.entries], found.rows, found.tail)


def mapped(path: Path, samples: int, tail: bytes) -> Rows:
    """The rows in the file. Raises ValueError if its tail differs, because it then belongs to other shards."""
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL.size))
        if file.read() != tail:
            raise ValueError(
                f"{path} was rebuilt, because shards changed while a run was reading them. Restart the script"
            )
        return _mapped(file, samples)


def _mapped(file: BinaryIO, samples: int) -> Rows:
    if not samples:
        return _no_rows()
    return np.memmap(file, dtype=np.dtype("<i8"), mode="r", shape=(samples, 2))


def _no_rows() -> Rows:
    return np.empty((0, 2), dtype=np.int64)


def _read(path: Path) -> _Found | None:
    """The index. None if there is none, or it is damaged."""
    try:
        with open(path, "rb") as file, named(str(path)):
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL.size))
            tail = file.read()
            length, checksum, magic = _TAIL.unpack(tail)
            file.seek(max(0, size - _TAIL.size - length))
            described = file.read(min(length, size))
            if magic != _MAGIC or zlib.crc32(described) != checksum:
                return None
            entries = [
                _Entry(Shard(os.path.normpath(path.parent / name), *facts), samples)
                for name, *facts, samples in json.loads(described)["shards"]
            ]
            samples = sum(entry.samples for entry in entries)
            if size - _TAIL.size - length != 16 * samples:
                return None
            return _Found(entries, _mapped(file, samples), tail)
    except (FileNotFoundError, struct.error):
        return None


def _build(path: Path, shards: list[Shard], scan: Scan, old: _Found | None) -> None:
    """Writes the index. Several processes may do that at the same time."""
    kept = _Kept(old)
    changed = [shard for shard in shards if shard not in kept]
    say(f"indexing {len(changed)} of {counted(len(shards), 'shard')}: {path}")
    with ExitStack() as stack:
        try:
            file = stack.enter_context(replacing(path))
        except OSError as error:
            reason = f"{error.strerror}. Pass index=FOLDER, a folder for the index"
            raise type(error)(error.errno, reason, str(path.parent)) from None
        _write(file, path.parent, shards, kept, scan)


def _write(file: BinaryIO, folder: Path, shards: list[Shard], kept: _Kept, scan: Scan) -> None:
    described = []
    for shard, rows in zip(shards, _all_rows(shards, kept, scan, folder), strict=True):
        before = file.tell()
        if isinstance(rows, np.ndarray):
            file.write(np.ascontiguousarray(rows, dtype="<i8").data)
        else:
            with rows:
                rows.seek(0)
                shutil.copyfileobj(rows, file, _IN_MEMORY)
        samples = (file.tell() - before) // 16
        described.append([os.path.relpath(shard.path, folder), shard.size, shard.mtime, samples])
    text = json.dumps({"shards": described}).encode()
    file.write(text + _TAIL.pack(len(text), zlib.crc32(text), _MAGIC))


def _all_rows(shards: list[Shard], kept: _Kept, scan: Scan, folder: Path) -> Iterator[Rows | IO[bytes]]:
    """The rows of each shard, or a file of them. Some are read ahead, because a network file system is slow."""

    def of(shard: Shard) -> Rows | IO[bytes]:
        return kept.rows(shard) if shard in kept else _scanned(shard, scan, folder)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for start in range(0, len(shards), _AT_ONCE):
            group = shards[start : start + _AT_ONCE]
            yield from pool.map(of, group)


def _scanned(shard: Shard, scan: Scan, folder: Path) -> IO[bytes]:
    """The rows of a shard, in a temporary file without a name if they are many."""
    file: IO[bytes] = SpooledTemporaryFile(_IN_MEMORY, dir=str(folder))
    pieces = scan(shard.path)
    while True:
        with named(shard.path):
            rows = next(pieces, None)
        if rows is None:
            return file
        file.write(np.ascontiguousarray(rows, dtype="<i8").data)


class _Kept:
    """The rows of unchanged shards in an older index."""

    def __init__(self, old: _Found | None) -> None:
        entries = old.entries if old is not None else []
        ends = np.cumsum([entry.samples for entry in entries], dtype=np.int64).tolist()
        self._places = {entry.shard: (end - entry.samples, end) for entry, end in zip(entries, ends, strict=True)}
        self._rows = old.rows if old is not None else _no_rows()

    def __contains__(self, shard: Shard) -> bool:
        return shard in self._places

    def rows(self, shard: Shard) -> Rows:
        start, stop = self._places[shard]
        return self._rows[start:stop]
