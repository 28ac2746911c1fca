"""Follows a file that others append to."""

from __future__ import annotations

import re
from pathlib import Path

from clusterddp.rundir.files import open_binary

#: The bytes that are read at a time, and the most that are kept of a line that has no end yet: its last ones.
BLOCK, MOST_KEPT = 1 << 20, 1 << 21


class GrowingFile:
    """A file that grows, line by line.

    ``ends``: what ends a line. Progress bars end theirs with a carriage return. ``from_end``: leaves out what the file
    has already.
    """

    def __init__(self, path: Path, ends: bytes = rb"\n", from_end: bool = False) -> None:
        self._path, self._ends = path, re.compile(ends)
        self._offset = path.stat().st_size if from_end and path.exists() else 0
        self._rest = b""

    def lines(self) -> list[str]:
        """The lines that have been completed since the last call, without their ends. None while there is no file."""
        found: list[bytes] = []
        try:
            with open_binary(self._path) as file:
                file.seek(self._offset)
                while data := file.read(BLOCK):
                    self._offset += len(data)
                    *complete, rest = self._ends.split(self._rest + data)
                    self._rest = rest[-MOST_KEPT:]
                    found += complete
        except FileNotFoundError:
            return []
        return [line.decode(errors="replace") for line in found]

    def rest(self) -> str:
        """The last line, which has no end, once nobody writes the file any more."""
        rest, self._rest = self._rest, b""
        return rest.decode(errors="replace")
