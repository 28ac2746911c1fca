"""Lines of text files: where each begins and ends."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from clusterddp.data.streams.index_file import Rows
from clusterddp.data.streams.shards import check_uncompressed

#: Bytes that are searched for newlines at once.
_CHUNK = 1 << 22


def scan(path: str) -> Iterator[Rows]:
    """The place of each line but empty ones, without its newline; in pieces, as there may be many."""
    check_uncompressed(path, "unpack it (gunzip), as a line within it cannot be found")
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
    """Without those that are empty, or a carriage return alone, as in text of Windows.

    ``found``: the bytes from ``offset`` on.
    """
    sizes = stops - starts
    short = np.flatnonzero(sizes == 1)
    sizes[short[found[starts[short] - offset] == ord("\r")]] = 0
    kept = sizes > 0
    return np.stack([starts[kept], sizes[kept]], axis=1)
