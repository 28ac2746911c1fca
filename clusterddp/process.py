"""Processes of this machine: when one started, and that it dies with its parent. Linux, standard library only."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def process_start(pid: int) -> str | None:
    """When a process started, in clock ticks since boot (proc(5), field 22); None when there is none, or a zombie.

    With its number it names a process for good: numbers are used again.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()
    return None if state == "Z" else fields[18]


def die_with_parent() -> None:
    """KILLs this process when its parent ends, however that happens: nothing of a local run is left behind."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
