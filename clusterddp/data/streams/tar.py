"""Samples in tar archives: neighbouring files with the same name up to the first dot.

A sample is a stretch of its archive, headers included. It is read in one piece, and its headers are read again then, so
that the index needs two numbers per sample.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from clusterddp.data.streams.index_file import Rows
from clusterddp.data.streams.shards import check_uncompressed

_BLOCK = 512
#: Types of members: ordinary files; headers that say more about the next member; those without data, even if their
#: size is not 0; and what is not supported.
_FILE, _LONG_NAME, _PAX, _OTHER_HEADERS = (b"0", b"\0", b"7"), b"L", b"x", (b"g", b"K")
_LINKS, _SPARSE = (b"1", b"2"), b"S"
_WITHOUT_DATA = (*_LINKS, b"3", b"4", b"5", b"6")
#: Bytes of a long name or of pax records: such a header is read into memory.
_MOST_OF_HEADER = 1 << 24
#: More zeros at the end are not padding, which fills a record of 10 KiB by default, but a copy that is not complete.
_MOST_PADDING = 1 << 21
#: Samples whose places are in memory.
_AT_ONCE = 10_000
#: Reads so many bytes from a position on; fewer at the end.
Read = Callable[[int, int], bytes]


class Member(NamedTuple):
    """A file in an archive. ``start``: of its headers; ``stop``: of its data, without padding."""

    name: str
    start: int
    data: int
    stop: int


def members(read: Read, start: int, stop: int, whole: bool = True) -> Iterator[Member]:
    """All files of a whole archive, or of a stretch of one, in sequence. Raises ValueError where it is damaged."""
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
                f"{name!r} at byte {at} is a link, which has no data here: pack files with GNU tar's --dereference and "
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
        raise ValueError(f"it ends at byte {stop} without the zeros that end an archive: it was cut")
    for at in range(position, stop, _MOST_PADDING):
        zeros = read(at, min(_MOST_PADDING, stop - at))
        if data := zeros.lstrip(b"\0"):
            raise ValueError(
                f"zeros follow at byte {position}, where a header or the end should be, and more data at byte "
                f"{at + len(zeros) - len(data)}: it is damaged, or made of several archives, which should be shards of "
                "their own"
            )
    if stop - position > _MOST_PADDING:
        raise ValueError(
            f"zeros follow from byte {position} to the end, {stop - position} bytes: the copy is not complete, or the "
            "archive was packed with a --blocking-factor above 4096"
        )


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
    return _number(field.split(b"\0", 1)[0].strip() or b"0", 8, position)


def _number(digits: bytes, base: int, position: int) -> int:
    """Raises ValueError for anything but digits, while ``int`` also takes signs and underscores."""
    try:
        if not digits.isdigit():
            raise ValueError
        return int(digits, base)
    except ValueError:
        raise ValueError(f"the header at byte {position} has the size {digits[:40]!r}, which is no number") from None


def _name(header: bytes) -> str:
    name, prefix = _text(header[:100]), _text(header[345:500])
    return f"{prefix}/{name}" if prefix and header[257:263] == b"ustar\0" else name


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode(errors="surrogateescape")


def _pax(data: bytes, position: int) -> dict[str, str]:
    """The records ``LENGTH NAME=VALUE``; zeros end them, as tarfile has it."""
    found, at = {}, 0
    while data[at : at + 1].strip(b"\0"):
        digits = data[at : at + 20].partition(b" ")[0]
        length = int(digits) if digits.isdigit() else 0
        record = data[at + len(digits) + 1 : at + length]
        name, equals, value = record.partition(b"=")
        if at + length > len(data) or not equals or not value.endswith(b"\n"):
            raise ValueError(f"there is no pax record at byte {position + at}, but {data[at : at + 40]!r}")
        found[name.decode(errors="surrogateescape")] = value[:-1].decode(errors="surrogateescape")
        at += length
    return found


def split_name(name: str) -> tuple[str, str]:
    """The sample that a file belongs to, and its extension there: empty for a file without one."""
    folder, _, base = name.rpartition("/")
    key, _, extension = base.partition(".")
    return (f"{folder}/{key}" if folder else key), extension.lower() if key else ""


def scan(path: str) -> Iterator[Rows]:
    """Where each sample of an archive is, in pieces. Raises ValueError for what is not an archive, or is damaged."""
    check_uncompressed(path, "unpack it; most images, sounds and videos are compressed already")
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
                    raise ValueError(f"the files of sample {key!r} are not next to each other: sort them by name")
                if last is not None:
                    yield start, stop - start
                keys.add(key)
                last, start = key, member.start
            stop = member.stop
    if last is not None:
        yield start, stop - start


def sample(data: bytes, start: int) -> tuple[str, dict[str, bytes]]:
    """The name of the sample in the stretch of an archive from ``start`` on, and its files by extension.

    Raises ValueError for what is no sample.
    """
    files: dict[str, bytes] = {}
    key = ""
    for member in members(lambda at, size: data[at - start : at - start + size], start, start + len(data), whole=False):
        key_of_file, extension = split_name(member.name)
        if not extension:
            continue
        if extension in files:
            raise ValueError(f"sample {key_of_file!r} has two files .{extension}")
        key, files[extension] = key_of_file, data[member.data - start : member.stop - start]
    if not files:
        raise ValueError("there is no file: the archive has changed since it was indexed")
    return key, files
