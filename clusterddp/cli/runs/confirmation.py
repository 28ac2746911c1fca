"""Asking before a command ends or deletes something."""

from __future__ import annotations

import sys


def can_ask() -> bool:
    """Whether someone sees the question and can answer it."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))


def agreed(question: str) -> bool:
    """Asks on the terminal; only y and yes agree."""
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()
    if not answer.endswith("\n"):  # Ctrl-D: what follows begins a line
        print(file=sys.stderr)
    return answer.strip().lower() in ("y", "yes")
