"""A checkpoint's file that is read in parts, each verified before it is used. Without torch."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from clusterddp.checkpoint import file_format
from clusterddp.rundir.files import open_file
from clusterddp.rundir.records import retrying


class VerifiedFile:
    """A file, of which each chunk is verified before any of its bytes is returned. Use as a context manager.

    ``errors``: ``Checkpoint.errors``.
    """

    def __init__(self, path: Path, head: file_format.Head, errors: Callable[[], AbstractContextManager[None]]) -> None:
        self._path, self._head, self._errors = path, head, errors
        self._buffer, self._number = bytearray(file_format.CHUNK), -1

    def __enter__(self) -> VerifiedFile:
        with self._errors():
            self._file = open_file(self._path)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def read_into(self, into: memoryview, start: int) -> None:
        """Reads the data from ``start`` on. Raises CheckpointError."""
        done = 0
        while done < len(into):
            number, begin = divmod(start + done, file_format.CHUNK)
            size = self._size(number)
            if begin == 0 and size <= len(into) - done:
                self._read(number, [into[done : done + size]])
                done += size
                continue
            chunk = self._chunk(number)[begin : begin + len(into) - done]
            into[done : done + len(chunk)] = chunk
            done += len(chunk)

    def read_all(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Reads parts of the data straight into their memory, which has wrong bytes if this raises CheckpointError.

        ``parts``: where each begins. They are in this order, and do not overlap.
        """
        parts = [part for part in parts if part[1]]
        unused, self._number = memoryview(self._buffer), -1
        number, first = -1, 0
        while first < len(parts):
            number = max(number + 1, parts[first][0] // file_format.CHUNK)
            at, end = number * file_format.CHUNK, number * file_format.CHUNK + self._size(number)
            pieces = []
            while first < len(parts) and (start := parts[first][0]) < end:
                into = parts[first][1]
                if at < start:
                    pieces.append(unused[: start - at])
                    at = start
                pieces.append(into[at - start : end - start])
                at += len(pieces[-1])
                if start + len(into) > end:  # continues in the next chunk
                    break
                first += 1
            pieces.append(unused[: end - at])
            self._read(number, pieces)

    def _size(self, number: int) -> int:
        return min(file_format.CHUNK, self._head.size - number * file_format.CHUNK)

    def _chunk(self, number: int) -> memoryview:
        """A chunk of which only a part is needed. The next tensor often needs the rest."""
        view = memoryview(self._buffer)[: self._size(number)]
        if number != self._number:
            self._number = -1
            self._read(number, [view])
            self._number = number
        return view

    def _read(self, number: int, pieces: Sequence[memoryview]) -> None:
        """Reads and verifies a whole chunk, piece by piece, while each is in the core's cache."""
        position, checksum = self._head.start + number * file_format.CHUNK, 0
        with self._errors():
            for into in pieces:
                for at in range(0, len(into), file_format.BUFFER):
                    piece = into[at : at + file_format.BUFFER]
                    retrying(self._path.parent, partial(file_format.read_into, self._file, piece, position))
                    checksum = zlib.crc32(piece, checksum)
                    position += len(piece)
            if checksum != self._head.sums[number]:
                raise file_format.Damaged(f"checksum mismatch in {self._path.name}")
