"""Datasets over large files, the shards, for ``ctx.loader``, with direct access to each sample.

They have a length and an index, so a run resumes exactly, on any number of ranks and workers, in any order.
``orders.by_shard()`` reads nearly in sequence. The positions of the samples are found once and kept in an index file.
Shards are local files or files of a shared disk.

They are map-style datasets. A dataset has the samples of the first shard, then those of the second, and so on. A sample
of text files is a line. A sample of a tar archive is a group of neighbouring files with the same name up to the first
dot. It is a stretch of its archive, including headers. It is read in one piece, with its headers, so that the index
needs two numbers per sample.
"""

from __future__ import annotations

import bisect
import json
import operator
import os
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from clusterddp.data.shards import (
    Files,
    Paths,
    Rows,
    Scan,
    Shard,
    check_uncompressed,
    folder_of,
    found,
    index_of,
    index_place,
    mapped,
    patterns_of,
)


class Sharded(Dataset[Any]):
    """Has the number of samples of each shard. A subclass reads one in ``_sample``."""

    def __init__(self, shards: list[Shard], counts: list[int]) -> None:
        self._paths = [shard.path for shard in shards]
        self._ends: list[int] = np.cumsum(counts, dtype=np.int64).tolist()
        self._files = Files()

    @property
    def shards(self) -> list[str]:
        """The files, in the order of their samples."""
        return list(self._paths)

    @property
    def shard_lengths(self) -> npt.NDArray[np.int64]:
        """The number of samples in each shard."""
        ends = np.array([0, *self._ends], dtype=np.int64)
        return ends[1:] - ends[:-1]

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        number = operator.index(index)
        number += len(self) if number < 0 else 0
        if not 0 <= number < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        shard = bisect.bisect_right(self._ends, number)
        return self._sample(self._paths[shard], number, number - (self._ends[shard - 1] if shard else 0))

    def _sample(self, path: str, number: int, within: int) -> Any:
        """The sample of this number in the dataset and within its shard."""
        raise NotImplementedError


class Indexed(Sharded):
    """Samples that are stretches of bytes. The index is memory-mapped, by each worker for itself."""

    def __init__(
        self,
        kind: str,
        files: Paths,
        index: str | os.PathLike[str] | None,
        decode: Callable[[Any], Any] | None,
        scan: Scan,
    ) -> None:
        patterns = patterns_of(files)
        shards = found(patterns)
        folder = Path(index).absolute() if index is not None else folder_of(shards)
        loaded = index_of(index_place(folder, kind, patterns), shards, scan)
        super().__init__(shards, loaded.counts)
        self._index, self._tail, self._decode = loaded.path, loaded.tail, decode
        self._rows: Rows | None = loaded.rows

    def _bytes(self, path: str, number: int) -> tuple[int, bytes]:
        """Where a sample begins in its shard, and its bytes."""
        if self._rows is None:
            self._rows = mapped(self._index, len(self), self._tail)
        start, size = self._rows[number].tolist()
        try:
            return start, self._files.read(path, start, size)
        except ValueError as error:
            raise ValueError(f"{error}. If the file is complete, delete its index {self._index}") from None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rows": None}


#: Bytes that are searched for newlines at once.
_CHUNK = 1 << 22


def scan_lines(path: str) -> Iterator[Rows]:
    """The place of each line except empty ones, without its newline, in pieces, because there may be many."""
    check_uncompressed(path, "Unpack it (gunzip), because lines within it cannot be found")
    position = begin = 0
    last = b""  # of the bytes before
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            found = np.frombuffer(last + chunk, dtype=np.uint8)
            offset = position - len(last)
            stops = np.flatnonzero(found == ord("\n")) + offset
            position, last = position + len(chunk), chunk[-1:]
            if stops.size:
                starts = np.concatenate([np.array([begin]), stops[:-1] + 1])
                yield _lines(starts, stops, found, offset)
                begin = int(stops[-1]) + 1
    if begin < position:
        yield _lines(np.array([begin]), np.array([position]), np.frombuffer(last, dtype=np.uint8), position - 1)


def _lines(starts: Rows, stops: Rows, found: npt.NDArray[np.uint8], offset: int) -> Rows:
    """Without those that are empty, or only a carriage return, as in text of Windows.

    ``found``: the bytes from ``offset`` on.
    """
    sizes = stops - starts
    short = np.flatnonzero(sizes == 1)
    sizes[short[found[starts[short] - offset] == ord("\r")]] = 0
    kept = sizes > 0
    return np.stack([starts[kept], sizes[kept]], axis=1)


_BLOCK = 512
#: Types of members: ordinary files; headers that say more about the next member; those without data, even if their
#: size is not 0; and what is not supported.
_FILE, _LONG_NAME, _PAX, _OTHER_HEADERS = (b"0", b"\0", b"7"), b"L", b"x", (b"g", b"K")
_LINKS, _SPARSE = (b"1", b"2"), b"S"
_WITHOUT_DATA = (*_LINKS, b"3", b"4", b"5", b"6")
#: Bytes of a long name or of pax records: such a header is read into memory.
_MOST_OF_HEADER = 1 << 24
#: More zeros at the end are not padding, which fills a record of 10 KiB by default, but an incomplete copy.
_MOST_PADDING = 1 << 21
#: Samples whose places are in memory.
_AT_ONCE = 10_000
#: Reads this many bytes from a position on, fewer at the end.
Read = Callable[[int, int], bytes]


class Member(NamedTuple):
    """A file in an archive. ``start``: of its headers. ``stop``: of its data, without padding."""

    name: str
    start: int
    data: int
    stop: int


def members(read: Read, start: int, stop: int, whole: bool = True) -> Iterator[Member]:
    """All files of a whole archive, or of a stretch of one, in sequence. Raises ValueError if it is damaged."""
    position = start
    known: dict[str, str] = {}  # of the next member
    while position < stop:
        header = read(position, _BLOCK)
        if whole and not header.strip(b"\0"):
            break
        at, kind, size = position, header[156:157], _size(header, position)
        is_file = kind not in (_LONG_NAME, _PAX, *_OTHER_HEADERS)
        if kind in _WITHOUT_DATA:
            size = 0
        elif is_file and "size" in known:
            size = _number(known["size"].encode(errors="replace"), 10, at)
        data = at + _BLOCK
        position = data + -(-size // _BLOCK) * _BLOCK
        name = known.get("path") or _name(header)
        if data + size > stop:
            raise ValueError(f"it ends at byte {stop}, within {name!r}, whose header is at byte {at}")
        if kind in (_LONG_NAME, _PAX):
            if size > _MOST_OF_HEADER:
                raise ValueError(f"the header at byte {at} has {size} bytes, which is more than a name or records need")
            known.update({"path": _text(read(data, size))} if kind == _LONG_NAME else _pax(read(data, size), data))
        if not is_file:
            continue
        if kind == _SPARSE or any(record.startswith("GNU.sparse.") for record in known):
            raise ValueError(f"{name!r} at byte {at} is stored as a sparse file, which is not supported")
        if kind in _LINKS and split_name(name)[1]:
            raise ValueError(
                f"{name!r} at byte {at} is a link without data. Pack files with GNU tar's --dereference and "
                "--hard-dereference"
            )
        if kind in _FILE:
            yield Member(name, start, data, data + size)
        known, start = {}, position
    if whole:
        _check_end(read, position, stop)


def _check_end(read: Read, position: int, stop: int) -> None:
    """Raises ValueError unless zeros follow the last member: two blocks by the standard, some programs write one."""
    if stop - position < _BLOCK:
        raise ValueError(f"it ends at byte {stop} without the zeros that end an archive, so it is truncated")
    for at in range(position, stop, _MOST_PADDING):
        zeros = read(at, min(_MOST_PADDING, stop - at))
        if data := zeros.lstrip(b"\0"):
            raise ValueError(
                f"there are zeros at byte {position}, which should end the archive, but more data at byte "
                f"{at + len(zeros) - len(data)}. The archive is damaged, or made of several archives, which should be "
                "separate shards"
            )
    if stop - position > _MOST_PADDING:
        raise ValueError(
            f"the last {stop - position} bytes, from byte {position} on, are zeros. The copy is incomplete, or the "
            "archive was packed with a --blocking-factor above 4096"
        )


def _size(header: bytes, position: int) -> int:
    """The size of a member's data. Raises ValueError if this is no header."""
    try:
        expected = int(header[148:156].strip(b" \0"), 8)
    except ValueError:
        expected = -1
    if len(header) < _BLOCK or expected != sum(header) - sum(header[148:156]) + 8 * ord(" "):
        raise ValueError(f"there is no header at byte {position}, so it is damaged or not a tar archive")
    field = header[124:136]
    if field[0] & 0x80:  # GNU: 8 GiB and more
        return int.from_bytes(field[1:], "big")
    return _number(field.split(b"\0", 1)[0].strip() or b"0", 8, position)


def _number(digits: bytes, base: int, position: int) -> int:
    """Raises ValueError for anything but digits, while ``int`` also takes signs and underscores."""
    try:
        if not digits.isdigit():
            raise ValueError
        return int(digits, base)
    except ValueError:
        raise ValueError(f"the header at byte {position} has the size {digits[:40]!r}, which is not a number") from None


def _name(header: bytes) -> str:
    name, prefix = _text(header[:100]), _text(header[345:500])
    return f"{prefix}/{name}" if prefix and header[257:263] == b"ustar\0" else name


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode(errors="surrogateescape")


def _pax(data: bytes, position: int) -> dict[str, str]:
    """The records ``LENGTH NAME=VALUE``. Zeros end them, as tarfile has it."""
    found, at = {}, 0
    while data[at : at + 1].strip(b"\0"):
        digits = data[at : at + 20].partition(b" ")[0]
        length = int(digits) if digits.isdigit() else 0
        record = data[at + len(digits) + 1 : at + length]
        name, equals, value = record.partition(b"=")
        if at + length > len(data) or not equals or not value.endswith(b"\n"):
            raise ValueError(f"expected a pax record at byte {position + at}, got {data[at : at + 40]!r}")
        found[name.decode(errors="surrogateescape")] = value[:-1].decode(errors="surrogateescape")
        at += length
    return found


def split_name(name: str) -> tuple[str, str]:
    """The sample that a file belongs to, and its extension there: empty for a file without one."""
    folder, _, base = name.rpartition("/")
    key, _, extension = base.partition(".")
    return (f"{folder}/{key}" if folder else key), extension.lower() if key else ""


def scan_archive(path: str) -> Iterator[Rows]:
    """Where each sample of an archive is, in pieces. Raises ValueError if it is not an archive, or damaged."""
    check_uncompressed(path, "Unpack it, because most images, sounds and videos are already compressed")
    try:
        places = _places(path)
        while rows := list(islice(places, _AT_ONCE)):
            yield np.array(rows, dtype=np.int64)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _places(path: str) -> Iterator[tuple[int, int]]:
    """Of each sample, where it begins, and its size."""
    keys: set[str] = set()
    last, start, stop = None, 0, 0
    with open(path, "rb", buffering=0) as file:

        def read(at: int, size: int) -> bytes:
            return os.pread(file.fileno(), size, at)

        for member in members(read, 0, os.fstat(file.fileno()).st_size):
            key, extension = split_name(member.name)
            if not extension:
                continue
            if key != last:
                if key in keys:
                    raise ValueError(f"the files of sample {key!r} are not next to each other. Sort them by name")
                if last is not None:
                    yield start, stop - start
                keys.add(key)
                last, start = key, member.start
            stop = member.stop
    if last is not None:
        yield start, stop - start


def read_sample(data: bytes, start: int) -> tuple[str, dict[str, bytes]]:
    """The name of the sample in the stretch of an archive from ``start`` on, and its files by extension.

    Raises ValueError if it is not a sample.
    """
    files: dict[str, bytes] = {}
    key = ""
    for member in members(lambda at, size: data[at - start : at - start + size], start, start + len(data), whole=False):
        key_of_file, extension = split_name(member.name)
        if not extension:
            continue
        if extension in files:
            raise ValueError(f"sample {key_of_file!r} has two .{extension} files")
        key, files[extension] = key_of_file, data[member.data - start : member.stop - start]
    if not files:
        raise ValueError("this sample has no file, so the archive has changed since it was indexed")
    return key, files


__all__ = ["JsonLines", "TarShards", "Tokens"]


class TarShards(Indexed):
    """Samples of uncompressed tar archives, as webdataset has them.

    Neighbouring files with the same name up to the first dot are a sample: ``000.jpg`` and ``000.cls``. It is a dict
    with the bytes of each file by its extension, in lower case, and ``__key__`` (``000``) and ``__url__`` (the shard's
    path).

    Args:
        files: a path, a pattern such as ``data/train-*.tar``, or a list of them. The samples are in the order of the
            sorted paths.
        decode: makes a sample of that dict, in the worker that reads it.
        index: the folder of the index file. None: next to the first shard.

    Raises FileNotFoundError for a pattern without a file, ValueError for an archive that is compressed, damaged or cut,
    has more data after its end, as archives joined by ``cat`` have, or has a sample's files apart, and OSError if the
    index cannot be written.

    Example::

        with ctx.main_first():  # rank 0 builds the index, unless there is one
            dataset = streams.TarShards("data/train-*.tar", decode)
        loader = ctx.loader(dataset, batch_size=64, order=orders.by_shard(), num_workers=4)
    """

    def __init__(
        self,
        files: Paths,
        decode: Callable[[dict[str, Any]], Any] | None = None,
        *,
        index: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__("tar", files, index, decode, scan_archive)

    def _sample(self, path: str, number: int, within: int) -> Any:  # noqa: ARG002
        start, data = self._bytes(path, number)
        try:
            key, files = read_sample(data, start)
        except ValueError as error:
            raise ValueError(f"{path}, sample at byte {start}: {error}") from None
        sample = {"__key__": key, "__url__": path, **files}
        try:
            return sample if self._decode is None else self._decode(sample)
        except Exception as error:
            if sys.version_info >= (3, 11):
                error.add_note(f"in sample {key!r} of {path}")
            raise


class JsonLines(Indexed):
    """The lines of text files, one sample each, parsed as JSON. Empty lines are left out.

    Args:
        files: a path, a pattern such as ``data/*.jsonl``, or a list of them. The samples are in the order of the sorted
            paths.
        decode: makes a sample of a line's bytes, in the worker that reads it.
        index: the folder of the index file. None: next to the first shard.

    Raises FileNotFoundError for a pattern without a file, ValueError for a compressed file, and OSError if the index
    cannot be written.

    Example: ``dataset = streams.JsonLines("data/*.jsonl")``
    """

    def __init__(
        self, files: Paths, decode: Callable[[bytes], Any] = json.loads, *, index: str | os.PathLike[str] | None = None
    ) -> None:
        super().__init__("lines", files, index, decode, scan_lines)

    def _sample(self, path: str, number: int, within: int) -> Any:  # noqa: ARG002
        start, line = self._bytes(path, number)
        assert self._decode is not None
        try:
            return self._decode(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line at byte {start}: {error}") from error


class Tokens(Sharded):
    """Blocks of files of token numbers, such as ``numpy.array(tokens, dtype).tofile(path)`` writes.

    Sample i of a file is tokens i * ``length`` to (i + 1) * ``length`` - 1 and, as its target, the tokens that follow
    each of them: two int64 tensors. A remainder at the end of a file that is too short for a block is ignored. Needs
    no index file, because the files' sizes determine the blocks.

    Args:
        files: a path, a pattern such as ``data/*.bin``, or a list of them. The samples are in the order of the sorted
            paths.
        length: tokens per block.
        dtype: of a token in the files.

    Raises FileNotFoundError for a pattern without a file, ValueError for a file without a whole number of tokens, and
    for a type other than integers.

    Example: ``dataset = streams.Tokens("data/*.bin", length=1024)``
    """

    def __init__(self, files: Paths, length: int, dtype: npt.DTypeLike = "uint16") -> None:
        self._length, self._dtype = length, np.dtype(dtype)
        if type(length) is not int or length < 1:
            raise ValueError(f"length is {length!r}: expected the number of tokens per block, 1 or more")
        if self._dtype.kind not in "iu":
            raise ValueError(f"dtype is {self._dtype}: expected an integer type, such as uint16")
        shards = found(patterns_of(files))
        for shard in shards:
            if shard.size % self._dtype.itemsize:
                raise ValueError(
                    f"{shard.path} has {shard.size} bytes, which is not a multiple of the size of {self._dtype}"
                )
        super().__init__(shards, [max(0, shard.size // self._dtype.itemsize - 1) // length for shard in shards])

    def _sample(self, path: str, number: int, within: int) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002
        size = self._dtype.itemsize
        data = self._files.read(path, within * self._length * size, (self._length + 1) * size)
        tokens = torch.from_numpy(np.frombuffer(data, dtype=self._dtype).astype(np.int64))
        return tokens[:-1], tokens[1:]
