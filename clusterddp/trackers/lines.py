"""The lines of a run that count, read once each while the run's rank 0 appends more."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from clusterddp.rundir.records import METRICS, parse, with_floats

#: Bytes that are read at a time; more than the longest line.
BLOCK = 1 << 23
Line = dict[str, Any]


class Lines:
    """The lines of a JSON lines file from step ``first`` on for which ``counts``, in the order of the file.

    That is the order of steps: all lines below a checkpoint are in the file before an attempt resumes from it.
    """

    def __init__(self, path: Path, counts: Callable[[Mapping[str, Any]], bool], first: int) -> None:
        self._path, self._counts, self._first = path, counts, first
        self._read_to = 0
        self._unparsed: deque[bytes] = deque()
        self._next: Line | None = None

    def below(self, step: float) -> Iterator[Line]:
        """The lines below ``step`` that were not returned before."""
        while (line := self._peek()) is not None and line["step"] < step:
            self._next = None
            yield with_floats(line)

    def _peek(self) -> Line | None:
        while self._next is None and (self._unparsed or self._read()):
            line, _ = parse(self._unparsed.popleft(), METRICS)
            if line is not None and line["step"] >= self._first and self._counts(line):
                self._next = line
        return self._next

    def _read(self) -> bool:
        """Reads on, in whole lines: the last may still be being written. Opens the file each time, as rank 0 replaces
        it by a copy after a failed write."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._read_to)
                block = file.read(BLOCK)
        except FileNotFoundError:
            return False
        whole = block[: block.rfind(b"\n") + 1]
        self._read_to += len(whole)
        self._unparsed.extend(whole.split(b"\n")[:-1])
        return bool(whole)
