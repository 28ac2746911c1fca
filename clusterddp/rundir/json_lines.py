"""Reads JSON lines files from either end.

A file has one writer, which appends durably. Readers skip what is not a complete line: a torn last line (the writer was
killed), a line that was lost in a machine crash (it reads as NUL), and, with a warning, a line that another program
wrote.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from clusterddp.reporter import say
from clusterddp.rundir.files import open_binary
from clusterddp.rundir.records import LARGEST, retrying
from clusterddp.rundir.schemas import METRICS, RESULT, Schema, schema_error

#: Bytes read at a time from the end of a file; doubled for as long as a line continues.
_BLOCK = 1 << 16
#: Bytes at the end of a file that are searched for a whole line, as a damaged file may have terabytes of zeros.
_LONGEST_LINE = 1 << 26
#: Lines that are parsed at once.
_TOGETHER = 250


def open_lines(path: Path) -> BinaryIO:
    """Opens a JSON lines file. Raises OSError, also if it has large holes, which were never written."""
    file = open_binary(path)
    if _holes(file.fileno()) > LARGEST:
        file.close()
        raise OSError(errno.EFBIG, "a sparse file, most of which was never written", str(path))
    return file


def _holes(descriptor: int) -> int:
    """The bytes of a large file's holes. 0 if the file system cannot tell. Leaves the file at its beginning."""
    size, found, position = os.fstat(descriptor).st_size, 0, 0
    if size <= LARGEST:
        return 0
    try:
        while found <= LARGEST and (hole := os.lseek(descriptor, position, os.SEEK_HOLE)) < size:
            found += size - hole  # if no data follows
            position = os.lseek(descriptor, hole, os.SEEK_DATA)
            found -= size - position
    except OSError:  # ENXIO: no data follows. EINVAL: the file system cannot tell
        pass
    os.lseek(descriptor, 0, os.SEEK_SET)
    return found


def read_lines(path: Path, schema: Schema | None = None) -> Iterator[dict[str, Any]]:
    """The objects of a JSON lines file, oldest first. Empty if the file does not exist.

    Lines that do not match the schema are skipped, with one warning that names the first of them.
    """
    try:
        content = retrying(path, lambda: _all_of(path))
    except FileNotFoundError:
        return
    skipped: list[tuple[int, str]] = []
    for number, (value, wrong) in enumerate(parsed(content.split(b"\n")[:-1], schema), start=1):
        if value is not None:
            yield value
        elif wrong:
            skipped.append((number, wrong))
    _warn(path, skipped)


def _all_of(path: Path) -> bytes:
    with open_lines(path) as file:
        return file.read()


def read_backwards(path: Path, schema: Schema | None = None, block: int = _BLOCK) -> Iterator[dict[str, Any]]:
    """The objects of a JSON lines file, newest first. Skips the same lines as ``read_lines``.

    Reads blocks of so many bytes from the end, so that the newest lines of a long file cost little.
    """
    try:
        file = retrying(path, lambda: open_binary(path))
    except FileNotFoundError:
        return
    warned = False
    with file:
        for start, line in _lines_backwards(path, file, block):
            value, wrong = parse(line, schema)
            if value is not None:
                yield value
            elif wrong and not warned:
                file.seek(0)
                _warn(path, [(file.read(start).count(b"\n") + 1, wrong)])
                warned = True


def last_lines(path: Path, size: int) -> list[bytes]:
    """The complete lines in the last ``size`` bytes of a file, oldest first. If one line fills these, more are read."""
    return both_ends(path, size, first=0)[1]


def both_ends(path: Path, size: int, first: int | None = None) -> tuple[list[bytes], list[bytes]]:
    """The complete lines in the first and in the last ``size`` bytes of a file, oldest first. Of a small file, none and
    all. The file is opened once. If one line fills the last bytes, more are read. ``first``: the number of bytes at
    the beginning, if it differs."""
    try:
        file = retrying(path, lambda: open_binary(path, buffered=False))
    except FileNotFoundError:
        return [], []
    with file:
        end = file.seek(0, os.SEEK_END)
        block = min(size, end)
        lines = _read_at(path, file, end - block, block).split(b"\n")
        # The first line is cut, and what follows the last line end is torn.
        while block < min(end, _LONGEST_LINE) and len(lines) < 3:
            block = min(2 * block, end)
            lines = _read_at(path, file, end - block, block).split(b"\n")
        most = min(size if first is None else first, end - block)
        beginning = _read_at(path, file, 0, most).split(b"\n") if most else [b""]
    return beginning[:-1], lines[block < end : -1]


def _lines_backwards(path: Path, file: BinaryIO, usual: int = _BLOCK) -> Iterator[tuple[int, bytes]]:
    """The complete lines, newest first, each with its position in the file."""
    start, block, rest, torn = file.seek(0, os.SEEK_END), usual, b"", True
    while start > 0:
        size = min(block, start)
        start -= size
        beginning, *lines = (_read_at(path, file, start, size) + rest).split(b"\n")
        rest, block = beginning, usual if lines else 2 * block
        position = start + len(beginning) + 1 + sum(len(line) + 1 for line in lines)
        for line in reversed(lines):
            position -= len(line) + 1
            if not torn:  # what follows the last line end is
                yield position, line
            torn = False
    if not torn:
        yield 0, rest


def _read_at(path: Path, file: BinaryIO, position: int, size: int) -> bytes:
    def read() -> bytes:
        file.seek(position)
        return file.read(size)

    return retrying(path, read)


def drop_torn_line(path: Path) -> None:
    """Removes an incomplete last line, left by a writer that was killed. The next writer calls it before it appends."""
    try:
        file = retrying(path, lambda: open_binary(path, change=True))
    except FileNotFoundError:
        return
    with file:
        start, line = next(_lines_backwards(path, file), (-1, b""))
        end = start + len(line) + 1
        if end != file.seek(0, os.SEEK_END):
            file.truncate(end)


def parse(line: bytes, schema: Schema | None) -> tuple[dict[str, Any] | None, str | None]:
    """A line's object, or what is wrong with the line. Neither if the line was lost in a machine crash."""
    # Blocks that the machine did not write read as NUL, which JSON never contains.
    written = line.rpartition(b"\0")[2] if b"\0" in line else line
    try:
        value = json.loads(str(written, errors="surrogatepass"))
    except (ValueError, RecursionError) as error:
        return None, None if b"\0" in line else f"not JSON: {error}"
    return _checked(value, schema)


def _checked(value: Any, schema: Schema | None) -> tuple[dict[str, Any] | None, str | None]:
    wrong = schema_error(value, schema or {})
    if wrong is not None and schema is METRICS and schema_error(value, RESULT) is None:
        return None, None
    return (value, None) if wrong is None else (None, wrong)


class WholeLines:
    """The lines of an open JSON lines file but an incomplete last one. ``torn``: whether there was one."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.torn = file, False

    def __iter__(self) -> Iterator[bytes]:
        for line in self._file:
            self.torn = not line.endswith(b"\n")
            if not self.torn:
                yield line


def parsed(lines: Iterable[bytes], schema: Schema | None) -> Iterator[tuple[dict[str, Any] | None, str | None]]:
    """``parse`` of each line. Reads many lines as one JSON array, which takes a third of the time."""
    remaining = iter(lines)
    while together := list(islice(remaining, _TOGETHER)):
        try:
            values = json.loads(str(b"[" + b",".join(together) + b"]", errors="surrogatepass"))
            if len(values) != len(together):
                raise ValueError("not one object per line")
        except (ValueError, RecursionError):
            yield from (parse(line, schema) for line in together)
            continue
        for value in values:
            yield _checked(value, schema)


#: The lines that this process has warned about.
_warned: set[tuple[Path, int]] = set()


def _warn(path: Path, skipped: list[tuple[int, str]]) -> None:
    new = [(number, wrong) for number, wrong in skipped if (path, number) not in _warned]
    _warned.update((path, number) for number, _ in new)
    if new:
        (number, wrong), more = new[0], len(new) - 1
        others = f", and {more} other line{'s'[: more != 1]}" if more else ""
        it, lines = ("them", "lines") if more else ("it", "line")
        say(
            f"skipped {path}:{number}{others}, because another program wrote {it} ({wrong}). To fix this, delete the "
            f"{lines}"
        )
