"""Reading a run's records: JSON files and JSON lines files, and the form that their objects must have.

A JSON lines file is appended by one process. What is not a whole line is skipped on reading: a torn last line (its
writer was killed), what a machine died before writing (it reads as NUL), and, with a warning, a line that something
else wrote. A line may have any length. Standard library only.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from clusterddp.errors import RunDirectoryError
from clusterddp.reporter import say

_T = TypeVar("_T")

#: Errors of a network file system that the next try may not meet, and the pauses before each further try, in seconds.
_TRANSIENT = frozenset((errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO))
_PAUSES_S = (0.05, 0.2, 0.75)
#: How much is read at a time from the end of a file; doubled as long as a line goes on.
_BLOCK = 1 << 16


def is_count(value: Any) -> bool:
    """Whether a value read from a file is a whole number that a step or an attempt can have."""
    return type(value) is int and 0 <= value < 2**63


def is_time(value: Any) -> bool:
    """Whether it is a number of unix seconds."""
    return type(value) in (int, float) and 0 <= value < 1e11


def is_text(value: Any) -> bool:
    """Whether it is text."""
    return isinstance(value, str)


def if_given(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """The same check, of a value that may be missing."""
    return lambda value: value is None or check(value)


#: What a JSON object must hold: its keys, each with a check that gets None for a missing one.
Form = Mapping[str, Callable[[Any], bool]]


def fault(value: Any, form: Form) -> str | None:
    """What is wrong with a value that is to be an object of this form; None when nothing is."""
    if not isinstance(value, dict):
        return f"expected an object, got {json.dumps(value)[:60]}"
    wrong = next((key for key, check in form.items() if not check(value.get(key))), None)
    return None if wrong is None else f"{wrong!r} is {json.dumps(value.get(wrong))[:60]}"


def patiently(path: Path, read: Callable[[], _T]) -> _T:
    """What ``read`` returns, which reads ``path``; retried when it fails by an error that may pass. Raises OSError."""
    for pause_s in _PAUSES_S:
        try:
            return read()
        except OSError as error:
            if error.errno not in _TRANSIENT:
                raise
            if pause_s == _PAUSES_S[0]:
                say(f"cannot read {path} ({error.strerror}); retrying")
        time.sleep(pause_s)
    return read()


def read_json(path: Path, form: Form | None = None) -> dict[str, Any] | None:
    """The JSON object in ``path``; None when there is no such file. RunDirectoryError unless it has the form."""
    try:
        text = patiently(path, path.read_bytes)
    except FileNotFoundError:
        return None
    try:
        value: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunDirectoryError(
            f"{path} is not JSON ({error}); it was written whole, so something else changed it"
        ) from error
    if wrong := fault(value, form or {}):
        raise RunDirectoryError(f"{path}: {wrong}; it was written otherwise, so something else changed it")
    return value


def read_lines(path: Path, form: Form | None = None) -> Iterator[dict[str, Any]]:
    """The objects of a JSON lines file, oldest first; nothing when the file is absent.

    Lines that are no object of this form are skipped, with one warning that names the first of them.
    """
    try:
        content = patiently(path, path.read_bytes)
    except FileNotFoundError:
        return
    skipped: list[tuple[int, str]] = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        value, wrong = _parsed(line, form)
        if value is not None:
            yield value
        elif wrong:
            skipped.append((number, wrong))
    _warn(path, skipped)


def last_line(path: Path, form: Form | None = None) -> dict[str, Any] | None:
    """The newest object in a JSON lines file; None when there is none. Reads no more than its end."""
    return next(read_backwards(path, form), None)


def read_backwards(path: Path, form: Form | None = None) -> Iterator[dict[str, Any]]:
    """The objects of a JSON lines file, newest first, skipping the same lines as ``read_lines``.

    It is read block by block from the end: whoever wants the newest lines of a long file pays for those alone.
    """
    try:
        file = patiently(path, lambda: open(path, "rb"))
    except FileNotFoundError:
        return
    warned = False
    with file:
        for start, line in _lines_backwards(path, file):
            value, wrong = _parsed(line, form)
            if value is not None:
                yield value
            elif wrong and not warned:
                _warn(path, [(_line_number(file, start), wrong)])
                warned = True


def _lines_backwards(path: Path, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The whole lines, each with the position at which it starts. What follows the last line end is torn."""
    start, block, rest, torn = file.seek(0, os.SEEK_END), _BLOCK, b"", True
    while start > 0:
        size = min(block, start)
        start -= size
        beginning, *lines = (_read_at(path, file, start, size) + rest).split(b"\n")
        rest, block = beginning, _BLOCK if lines else 2 * block
        position = start + len(beginning) + 1 + sum(len(line) + 1 for line in lines)
        for line in reversed(lines):
            position -= len(line) + 1
            if not torn:
                yield position, line
            torn = False
    if not torn:
        yield 0, rest


def _read_at(path: Path, file: BinaryIO, position: int, size: int) -> bytes:
    def read() -> bytes:
        file.seek(position)
        return file.read(size)

    return patiently(path, read)


def _line_number(file: BinaryIO, position: int) -> int:
    """The number of the line that starts there, from 1."""
    file.seek(0)
    return file.read(position).count(b"\n") + 1


def _parsed(line: bytes, form: Form | None) -> tuple[dict[str, Any] | None, str | None]:
    """A line's object; else why it is none (None where a machine died before it had written the line)."""
    # What the machine had not written reads as NUL, which JSON never has.
    written = line.rpartition(b"\0")[2]
    try:
        value = json.loads(written)
    except (ValueError, RecursionError) as error:
        return None, None if b"\0" in line else f"not JSON: {error}"
    wrong = fault(value, form or {})
    return (value, None) if wrong is None else (None, wrong)


#: The lines that were named in a warning of this process already.
_warned: set[tuple[Path, int]] = set()


def _warn(path: Path, skipped: list[tuple[int, str]]) -> None:
    new = [(number, wrong) for number, wrong in skipped if (path, number) not in _warned]
    _warned.update((path, number) for number, _ in new)
    if new:
        (number, wrong), more = new[0], len(new) - 1
        others = f", and {more} other line{'s'[: more != 1]}" if more else ""
        words = f"{path}:{number} skipped{others} ({wrong}): written by another program; delete it to fix the file"
        say(words)


def drop_torn_line(path: Path) -> None:
    """Cuts off what a killed writer left after the last whole line. For the next writer, before its first line."""
    try:
        file = patiently(path, lambda: open(path, "rb+"))
    except FileNotFoundError:
        return
    with file:
        end = start = file.seek(0, os.SEEK_END)
        found = -1
        while start > 0 and found < 0:
            start = max(0, start - _BLOCK)
            found = _read_at(path, file, start, _BLOCK).rfind(b"\n")
        whole = start + found + 1
        if whole != end:
            file.truncate(whole)
