"""Stops that a training script of a test asks for itself, at a chosen point."""

from __future__ import annotations

import signal
import time
from typing import Any


def request_stop(ctx: Any) -> None:
    """A TERM to this rank. Returns once it stops at the next boundary that all ranks can reach."""
    signal.raise_signal(signal.SIGTERM)
    await_stop(ctx)


def await_stop(ctx: Any) -> None:
    """Waits until this rank has voted on the stop that any rank has asked for."""
    while (vote := ctx._agreement._vote) is None:  # no public name: ranks have not agreed yet
        time.sleep(0.001)
    vote.voted.wait()
