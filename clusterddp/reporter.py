"""Output of clusterddp: messages on standard error, and a command's result on standard output.

Text of a run may be another user's and may contain anything, so all of it goes through ``printable``.
"""

from __future__ import annotations

import io
import os
import re
import select
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer
import unicodedata

#: Colours, and characters that a terminal would obey or show in a different order: control characters except tab and
#: line end, line and paragraph separators, changes of direction, and noncharacters.
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def printable(text: str) -> str:
    """A text that is safe for a terminal, without colours and with ``?`` for other control characters."""
    if text.isprintable():  # Unicode's categories: none of them
        return text
    return _OBEYED.sub("?", _COLOURS.sub("", text))


def put(text: str) -> None:
    """Prints a part of a command's result on standard output, as ``printable`` text."""
    print(printable(text), flush=True)


def show(text: str, raw: bool = False) -> None:
    """Prints ``text`` on standard error, as ``printable`` text unless ``raw``. Drops it if standard error does not
    accept it.

    A script may have closed or replaced its streams. Descriptor 2 is not a fallback, because once closed it may be
    reused for any file of the script.
    """
    if sys.stderr is None:  # print() would use standard output
        return
    with suppress(OSError, ValueError, AttributeError):  # a full disk, a closed stream, an object that is not a stream
        print(text if raw else printable(text), file=sys.stderr, flush=True)


def say(message: str) -> None:
    """``show``, with the prefix that distinguishes clusterddp's messages from other output."""
    show(f"clusterddp: {message}")


def say_unlocked(message: str) -> None:
    """``say`` for a thread that is about to end the process, while the main thread may hold the lock of sys.stderr."""
    with suppress(OSError):
        os.write(2, f"clusterddp: {printable(message)}\n".encode(errors="backslashreplace"))


def is_unread(stream: TextIO) -> bool:
    """Whether what is written to a stream is lost: its terminal was closed, or the reader of the pipe has ended."""
    poll = select.poll()
    try:
        poll.register(stream.fileno(), 0)
        return bool(poll.poll(0))
    except (OSError, ValueError):  # no file, or a closed one
        return False


def counted(number: int, one: str, many: str | None = None) -> str:
    """``1 step``, ``2 steps``."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def enumerated(one: str, names: Sequence[str]) -> str:
    """``job 5``, ``jobs 5, 6``."""
    return f"{one if len(names) == 1 else one + 's'} {', '.join(names)}"


def value_text(value: Any) -> str:
    """A logged value: a float with four digits, anything else as it is."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def in_words(error: BaseException) -> str:
    """An error's message on one line of at most 500 characters, or its class if the message is empty."""
    return " ".join(str(error).split())[:500] or type(error).__name__


def what_failed(error: BaseException) -> str:
    """An error's message. For an OSError, the file and the reason."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    if error.filename is None:
        return error.strerror
    path = re.sub(r"/\.([^/]+)\.[0-9a-f]{8}\.tmp$", r"/\1", str(error.filename))  # write_atomically's
    return f"{path}: {error.strerror}"


def duration(seconds: float) -> str:
    """``97 s``, ``5 min``, ``2 h 05 min``, ``3 d 4 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60:02} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def speed(seconds_per_step: float | None) -> str:
    """``12.5/s`` or ``3.1 s/step``, or empty if unknown."""
    if not seconds_per_step:
        return ""
    if seconds_per_step >= 1:
        return f"{seconds_per_step:.3g} s/step"
    rate = 1 / seconds_per_step
    return f"{rate:.3g}/s" if rate < 100 else f"{rate:,.0f}/s"


def ignore_print_errors() -> None:
    """Makes prints to stdout and stderr never fail. Output that cannot be written is lost."""
    sys.stdout, sys.stderr = forgiving(1), forgiving(2)


def forgiving(descriptor: int) -> io.TextIOWrapper:
    """A stream to a file descriptor to which prints never fail. Output that cannot be written is lost."""
    return io.TextIOWrapper(io.BufferedWriter(_Forgiving(descriptor)), errors="backslashreplace", line_buffering=True)


class _Forgiving(io.RawIOBase):
    """A file descriptor to which writes never fail."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Buffer) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError:
            return memoryview(data).nbytes


def in_one_line(text: str) -> str:
    """``printable`` text in one line: all kinds of line ends and other white space become single spaces.

    Else a text of a run could pass for further lines of the output.
    """
    return printable(" ".join(text.split()))


def one_line(text: str) -> str:
    """``printable`` text in one line: tabs and line ends become question marks, too."""
    return text if text.isprintable() else printable(text).translate({9: "?", 10: "?"})


def columns_of(text: str) -> int:
    """The columns of a terminal that a text takes: East Asian letters take two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        for letter in text
    )


def clipped(text: str, width: int, keep_end: bool = False) -> str:
    """A text clipped to ``width`` columns, at its beginning with ``keep_end``."""
    if columns_of(text) <= width:
        return text
    room, kept = max(width - 3, 0), 0
    for letter in reversed(text) if keep_end else text:  # it may have a million
        room -= columns_of(letter)
        if room < 0:
            break
        kept += 1
    return f"...{text[len(text) - kept :]}" if keep_end else f"{text[:kept]}..."


def can_ask() -> bool:
    """Whether a user can see a question and answer it."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))


def agreed(question: str) -> bool:
    """Asks on the terminal. Only y and yes agree."""
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()
    if not answer.endswith("\n"):  # after Ctrl-D, end the line
        print(file=sys.stderr)
    return answer.strip().lower() in ("y", "yes")
