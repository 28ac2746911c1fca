"""The process that compresses a rank's profile while training continues.

``python -m clusterddp.worker.trace_file TARGET``: the trace comes on standard input, as the Chrome JSON that torch's
profiler exports.
"""

from __future__ import annotations

import gzip
import os
import signal
import sys
from pathlib import Path
from typing import IO

from clusterddp.entry import exit_with
from clusterddp.errors import RunDirectoryError
from clusterddp.rundir.files import create_folder, replacing

NICENESS = 10
#: Bytes of the trace that are read at a time.
BLOCK = 1 << 20


def main() -> int:
    """Stores the trace on standard input as TARGET."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, lambda *_: sys.exit(1))  # the temporary file is deleted
    os.nice(NICENESS)
    try:
        store(sys.stdin.buffer, Path(sys.argv[1]))
    except OSError as error:
        raise RunDirectoryError(f"{error.strerror}: {error.filename}") from error
    return 0


def store(trace: IO[bytes], target: Path) -> None:
    """Writes the trace whole or not at all, and creates its folders.

    Raises OSError, and RunDirectoryError for a trace that is not complete.
    """
    for folder in (target.parent.parent, target.parent):
        create_folder(folder, exist_ok=True)
    with replacing(target) as file, gzip.GzipFile("", "wb", 6, file) as packed:
        end = b""
        while block := trace.read(BLOCK):
            packed.write(block)
            end = (end + block)[-64:]
        if not end.rstrip().endswith(b"}"):
            raise RunDirectoryError("the trace is incomplete. The node's temporary folder may be full")


if __name__ == "__main__":
    exit_with(main)
