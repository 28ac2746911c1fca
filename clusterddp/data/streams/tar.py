"""Samples in tar archives: neighbouring files with the same name up to the first dot.

A sample is a stretch of its archive, headers included. It is read in one piece, and its headers are read again then, so
that the index needs two numbers per sample.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from clusterddp.data.streams.index_file import Rows
from clusterddp.data.streams.shards import check_uncompressed

_BLOCK = 512
#: Types of members: ordinary files; headers that say more about the next member; and what is not supported.
_FILE, _LONG_NAME, _PAX, _OTHER_HEADERS, _SPARSE = (b"0", b"\0", b"7"), b"L", b"x", (b"g", b"K"), b"S"
#: Reads so many bytes from a position on; fewer at the end.
Read = Callable[[int, int], bytes]


class Member(NamedTuple):
    """A file in an archive. ``start``: of its headers; ``stop``: of its data, without padding."""

    name: str
    start: int
    data: int
    stop: int


def members(read: Read, stop: int) -> Iterator[Member]:
    """All files of an archive, or of a stretch of one, in sequence. Raises ValueError where it is damaged."""
    position, start = 0, 0
    known: dict[str, str] = {}  # of the next member
    while position < stop:
        header = read(position, _BLOCK)
        if not header.strip(b"\0"):  # the end of the archive
            return
        size, kind = _size(header, position), header[156:157]
        is_file = kind not in (_LONG_NAME, _PAX, *_OTHER_HEADERS)
        size = int(known.get("size", size)) if is_file else size
        data, position = position + _BLOCK, position + _BLOCK + -(-size // _BLOCK) * _BLOCK
        if kind == _LONG_NAME:
            known["path"] = _text(read(data, size))
        elif kind == _PAX:
            known.update(_pax(read(data, size)))
        if not is_file:
            continue
        if kind == _SPARSE:
            raise ValueError(f"{_name(header)!r} is stored as a sparse file, which is not supported")
        if data + size > stop:
            raise ValueError(f"it ends at byte {stop}, within {known.get('path') or _name(header)!r}")
        if kind in _FILE:
            yield Member(known.get("path") or _name(header), start, data, data + size)
        known, start = {}, position


def _size(header: bytes, position: int) -> int:
    """Of a member's data. Raises ValueError for what is no header."""
    try:
        expected = int(header[148:156].strip(b" \0"), 8)
    except ValueError:
        expected = -1
    if len(header) < _BLOCK or expected != sum(header) - sum(header[148:156]) + 8 * ord(" "):
        raise ValueError(f"there is no header at byte {position}: not a tar archive, or a damaged one")
    field = header[124:136]
    if field[0] & 0x80:  # GNU: 8 GiB and more
        return int.from_bytes(field[1:], "big")
    return int(field.strip(b" \0") or b"0", 8)


def _name(header: bytes) -> str:
    name, prefix = _text(header[:100]), _text(header[345:500])
    return f"{prefix}/{name}" if prefix and header[257:263] == b"ustar\0" else name


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode(errors="surrogateescape")


def _pax(data: bytes) -> dict[str, str]:
    """The records ``LENGTH NAME=VALUE``."""
    found = {}
    while data:
        length = int(data.split(b" ", 1)[0])
        name, _, value = data[:length].split(b" ", 1)[1].rstrip(b"\n").partition(b"=")
        found[name.decode()] = value.decode(errors="surrogateescape")
        data = data[length:]
    return found


def split_name(name: str) -> tuple[str, str]:
    """The sample that a file belongs to, and its extension there: empty for a file without one."""
    folder, _, base = name.rpartition("/")
    key, _, extension = base.partition(".")
    return (f"{folder}/{key}" if folder else key), extension.lower() if key else ""


def scan(path: str) -> Rows:
    """Where each sample of an archive is. Raises ValueError for what is not one, or is damaged."""
    check_uncompressed(path, "unpack it; most images, sounds and videos are compressed already")
    rows: list[tuple[int, int]] = []
    keys: set[str] = set()
    last = None
    with open(path, "rb", buffering=0) as file:

        def read(start: int, size: int) -> bytes:
            return os.pread(file.fileno(), size, start)

        try:
            for member in members(read, os.fstat(file.fileno()).st_size):
                key, extension = split_name(member.name)
                if not extension:
                    continue
                if key == last:
                    rows[-1] = (rows[-1][0], member.stop - rows[-1][0])
                    continue
                if key in keys:
                    raise ValueError(f"the files of sample {key!r} are not next to each other: sort them by name")
                rows.append((member.start, member.stop - member.start))
                keys.add(key)
                last = key
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


def sample(data: bytes) -> tuple[str, dict[str, bytes]]:
    """The name of the sample in a stretch of an archive, and its files by extension. Raises ValueError."""
    files: dict[str, bytes] = {}
    key = ""
    for member in members(lambda start, size: data[start : start + size], len(data)):
        key_of_file, extension = split_name(member.name)
        if not extension:
            continue
        if extension in files:
            raise ValueError(f"sample {key_of_file!r} has two files .{extension}")
        key, files[extension] = key_of_file, data[member.data : member.stop]
    return key, files
