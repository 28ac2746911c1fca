"""Whether the training loop of this process is complete: set by the loop, read by ``rank.py`` when the script ends.

Exit code 0 does not tell: a script may exit in the middle of its loop, for example from its own signal handler.
"""

from __future__ import annotations

import inspect
import opcode
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType

#: The instructions with which Python ends a loop at ``break`` and ``return``; the second from 3.14 on.
_DROP_ITERATOR = ("POP_TOP", "POP_ITER")


@dataclass
class Loop:
    """A loop over ``run.steps()`` that has begun and is not complete.

    ``step`` returns the number of steps done, of ``steps``. ``left_at``: the code and line that left it. ``failed``:
    whether it was probably left by an exception, rather than by ``break`` or ``return``.
    """

    step: Callable[[], int]
    steps: int
    left_at: tuple[CodeType, int] | None = None
    failed: bool = False

    def leave(self) -> None:
        """Called by the loop's generator when it is closed, by ``break``, an exception, or its deletion.

        Records the line of the frame that closes it, skipping other generators such as tqdm's: an exception that ends
        the loop passes through the same line. The frame's instruction is the one that raised, or the one that drops
        the loop's iterator; a call of the generator's ``close`` looks as if it had raised.
        """
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
            frame = frame.f_back
        self.left_at = frame.f_code, frame.f_lineno
        self.failed = opcode.opname[frame.f_code.co_code[frame.f_lasti]] not in _DROP_ITERATOR

    def ended_by(self, error: BaseException) -> bool:
        """Whether ``error`` was raised inside the loop, rather than after a ``break``."""
        places = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        return self.left_at is None or self.left_at in places


#: The newest loop, from its begin until it is complete.
loop: Loop | None = None
#: The reason, once ``stop_requested()`` has returned True in a loop of the script's own, until a loop is complete.
told_to_stop: str | None = None
#: The script exited in its loop: the other ranks may wait in a collective for this one, which must not wait for them.
exited_in_loop = False


def complete() -> None:
    """All steps of the loop are done."""
    global loop, told_to_stop
    loop = told_to_stop = None
