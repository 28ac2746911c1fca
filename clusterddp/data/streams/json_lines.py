"""Lines of text files: where each begins and ends."""

from __future__ import annotations

import numpy as np

from clusterddp.data.streams.index_file import Rows
from clusterddp.data.streams.shards import check_uncompressed

#: Bytes that are searched for newlines at once.
_CHUNK = 1 << 24


def scan(path: str) -> Rows:
    """The place of each line but empty ones, without its newline."""
    check_uncompressed(path, "unpack it (gunzip), as a line within it cannot be found")
    ends = []
    position = 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            ends.append(np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == ord("\n")) + position)
            position += len(chunk)
        stops = np.concatenate([*ends, np.array([position])]).astype(np.int64)
        starts = np.concatenate([np.zeros(1, dtype=np.int64), stops[:-1] + 1])
        rows = np.stack([starts, stops - starts], axis=1)
        rows = rows[rows[:, 1] > 0]
        for number in np.flatnonzero(rows[:, 1] == 1):  # perhaps an empty line of Windows
            file.seek(rows[number, 0])
            if file.read(1) == b"\r":
                rows[number, 1] = 0
    return rows[rows[:, 1] > 0]
