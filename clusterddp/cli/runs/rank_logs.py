"""The logs of ranks: which there are, and printing them whole, filtered, or as lines arrive.

Files are opened one at a time and read in blocks, so that neither thousands of ranks nor large logs cost memory.
"""

from __future__ import annotations

import codecs
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from clusterddp.errors import RunDirectoryError
from clusterddp.reporter import printable, show
from clusterddp.rundir.files import open_binary
from clusterddp.rundir.run_directory import RunDirectory

#: The most bytes read at once. A longer line is searched, and labelled, in pieces.
BLOCK = 1 << 20
#: Seconds between two looks at files that are followed: at least the first, and the second for each file.
LOOK_S, LOOK_PER_FILE_S = 0.2, 0.0005

_NAME = re.compile(r"rank-(\d{1,9})\.(out|err)", re.ASCII)
#: ANSI colours of the ranks' labels.
_COLOURS = (36, 33, 32, 35, 34, 31)

#: Whether a rank's logs are wanted.
Wanted = Callable[[int], bool]


@dataclass(frozen=True)
class Log:
    """What one rank wrote in one attempt: ``rank-R.out`` (its stdout) and ``rank-R.err`` (its stderr)."""

    folder: Path
    attempt: int
    rank: int

    def path(self, kind: str) -> Path:
        """The file of ``out`` or ``err``."""
        return self.folder / f"rank-{self.rank}.{kind}"


def logs_of(run: RunDirectory, attempt: int, wanted: Wanted) -> list[Log]:
    """The logs of an attempt's ranks, in their order; none if the attempt has no folder."""
    folder = run.attempt_logs(attempt)
    try:
        found = {int(match[1]) for match in map(_NAME.fullmatch, os.listdir(folder)) if match}
    except FileNotFoundError:
        return []
    return [Log(folder, attempt, rank) for rank in sorted(found) if wanted(rank)]


# --- whole files


def print_one(log: Log, pattern: re.Pattern[str] | None) -> bool:
    """Prints a rank's stdout to stdout and its stderr to stderr; returns whether there was anything to print."""
    printed = False
    for kind, stream in (("out", sys.stdout), ("err", sys.stderr)):
        write = _writer(stream, log.folder)
        for piece in _pieces(log.path(kind), pattern):
            write(piece)
            printed = True
        stream.flush()
    return printed


def print_grouped(logs: Iterable[Log], pattern: re.Pattern[str] | None) -> bool:
    """Prints logs to stdout, each file below a line that names it, unless it has nothing; returns whether any had."""
    printed = False
    for log in logs:
        write = _writer(sys.stdout, log.folder)
        for kind, name in (("out", "stdout"), ("err", "stderr")):
            last = b""
            for piece in _pieces(log.path(kind), pattern):
                if not last:
                    title = f"==> rank {log.rank}, attempt {log.attempt}: {name} <==\n"
                    write(("\n" * printed + title).encode())
                write(piece)
                last, printed = piece, True
            if last and not last.endswith(b"\n"):
                write(b"\n")
    sys.stdout.flush()
    return printed


def _writer(stream: TextIO, folder: Path) -> Callable[[bytes], object]:
    """Writes bytes as they are, with a rank's colours; on a terminal, those of another user as ``printable`` text."""
    if not stream.isatty() or folder.stat().st_uid == os.geteuid():
        return stream.buffer.write
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a block may end within a letter
    return lambda data: stream.buffer.write(printable(decoder.decode(data)).encode(errors="replace"))


def _pieces(path: Path, pattern: re.Pattern[str] | None) -> Iterator[bytes]:
    """A file in blocks, or its lines that match; nothing if it does not exist."""
    try:
        file = open_binary(path)
    except FileNotFoundError:
        return
    with file:
        if pattern is None:
            while block := file.read(BLOCK):
                yield block
        else:
            while line := file.readline(BLOCK):
                if _matches(pattern, line.rstrip(b"\r\n")):
                    yield line


def _matches(pattern: re.Pattern[str] | None, line: bytes) -> bool:
    return pattern is None or pattern.search(line.decode(errors="replace")) is not None


# --- as lines arrive


class Follower:
    """Follows logs of a run's ranks: one rank's as ``print_one`` prints it; those of several with a label on each line.

    ``alone``: only one rank is wanted.
    """

    def __init__(self, run: RunDirectory, wanted: Wanted, pattern: re.Pattern[str] | None, alone: bool) -> None:
        self._run, self._wanted, self._pattern, self._alone = run, wanted, pattern, alone
        self._coloured = coloured(sys.stdout)
        #: How much of each file of the present attempt has been printed.
        self._offsets: dict[Path, int] = {}

    def follow(self, number: int | None, later: bool) -> None:
        """Follows an attempt until it is superseded or the run is over; with ``later`` also those after it.

        ``number``: its number; None: the first, for which it waits.
        """
        while number is None and self._run.outcome() is None:
            self._pause(LOOK_S)
            number = min(self._run.attempts(), default=None)
        while number is not None:
            following = self._follow_one(number)
            number = following if later else None
            if number is not None:
                show(f"==> attempt {number} <==")

    def _follow_one(self, number: int) -> int | None:
        """Follows one attempt; returns the number of the next, None if the run is over."""
        self._offsets.clear()
        while True:
            # Before reading: what is read after an attempt's end is complete.
            following = min((other for other in self._run.attempts() if other > number), default=None)
            ended = following is not None or self._run.outcome() is not None
            logs = logs_of(self._run, number, self._wanted)
            more = [self._print_new(log, kind, ended) for log in logs for kind in ("out", "err")]
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            if ended and not any(more):
                return following
            if not any(more):
                self._pause(max(LOOK_S, LOOK_PER_FILE_S * len(more)))

    def _pause(self, seconds: float) -> None:
        """Waits for more. Raises RunDirectoryError if there can be none any more."""
        if not os.path.lexists(self._run.path):
            raise RunDirectoryError(f"{self._run} was deleted")
        time.sleep(seconds)

    def _print_new(self, log: Log, kind: str, ended: bool) -> bool:
        """Prints a file's new complete lines, and its incomplete last one if the attempt has ended; at most a block.

        Returns whether there may be more.
        """
        path = log.path(kind)
        offset = self._offsets.get(path, 0)
        try:
            with open_binary(path) as file:
                file.seek(offset)
                data = file.read(BLOCK)
        except FileNotFoundError:
            return False
        size = data.rfind(b"\n") + 1
        if not size and (ended or len(data) == BLOCK):
            size = len(data)
        if size:
            self._offsets[path] = offset + size
            self._print(log, kind, data[:size])
        return size > 0 and (ended or len(data) == BLOCK)

    def _print(self, log: Log, kind: str, data: bytes) -> None:
        stream = sys.stderr if self._alone and kind == "err" else sys.stdout
        write = _writer(stream, log.folder)
        if self._alone and self._pattern is None:
            write(data)
            return
        label = b"" if self._alone else self._label(log.rank)
        for line in data.removesuffix(b"\n").split(b"\n"):
            if _matches(self._pattern, line):
                stream.buffer.write(label)
                write(line + b"\n")

    def _label(self, rank: int) -> bytes:
        label = f"[rank {rank}]"
        return (f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{label}\x1b[0m " if self._coloured else f"{label} ").encode()


def coloured(stream: object) -> bool:
    """Whether a stream takes colours: it is a terminal, and NO_COLOR (no-color.org) is not set."""
    isatty = getattr(stream, "isatty", lambda: False)
    return isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
