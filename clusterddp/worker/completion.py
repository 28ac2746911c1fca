"""Whether the training of this process is complete: kept by the training half, read by the rank shim at the end.

Exit code 0 alone does not tell: a script may exit in the middle of its loop, for example from its own signal handler.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, TracebackType


@dataclass
class Loop:
    """A loop over ``run.steps()`` that has begun and is not complete. ``left_at``: where its ``for`` ended."""

    step: Callable[[], int]
    steps: int
    left_at: tuple[CodeType, int] | None = None

    def leave(self) -> None:
        """Called by the loop's generator when it is closed: by ``break``, an exception, or its deletion.

        Keeps the line of the frame that closes it (other generators, as tqdm's, may be between): an exception that ends
        the loop passes through the same line.
        """
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
            frame = frame.f_back
        self.left_at = frame.f_code, frame.f_lineno

    def ended_by(self, error: BaseException) -> bool:
        """Whether ``error`` was raised inside the loop, rather than after it was left by ``break``."""
        return self.left_at is None or self.left_at in _places(error.__traceback__)


#: The loop that was begun last, until it is complete.
loop: Loop | None = None
#: The reason, once ``ctx.stop_requested()`` has said to stop, until a loop is complete.
told_to_stop: str | None = None


def begin(step: Callable[[], int], steps: int) -> Loop:
    """A loop to ``steps`` begins; ``step`` tells how far it is."""
    global loop
    loop = Loop(step, steps)
    return loop


def complete() -> None:
    """All steps of the loop are done."""
    global loop, told_to_stop
    loop = told_to_stop = None


def stop(reason: str) -> None:
    """The script was told to stop, in a loop that only the script knows."""
    global told_to_stop
    told_to_stop = reason


def _places(trace: TracebackType | None) -> list[tuple[CodeType, int]]:
    places = []
    while trace is not None:
        places.append((trace.tb_frame.f_code, trace.tb_lineno))
        trace = trace.tb_next
    return places
