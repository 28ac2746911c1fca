"""What clusterddp prints on standard error. Standard output belongs to a command's result, or to the script."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def show(text: str) -> None:
    """Prints ``text``; drops it if standard error does not accept it.

    A script may have closed or replaced its streams. Descriptor 2 is no fallback: once closed, it may be reused for any
    file of the script.
    """
    if sys.stderr is None:  # print() would use standard output
        return
    with suppress(OSError, ValueError, AttributeError):  # a full disk, a closed stream, an object that is no stream
        print(text, file=sys.stderr, flush=True)


def say(message: str) -> None:
    """``show``, with the prefix that tells clusterddp's messages from a script's or a job's other output."""
    show(f"clusterddp: {message}")


def say_unlocked(message: str) -> None:
    """``say`` for a thread that is about to end the process, while the main thread may hold the lock of sys.stderr."""
    with suppress(OSError):
        os.write(2, f"clusterddp: {message}\n".encode(errors="backslashreplace"))
