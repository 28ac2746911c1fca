"""Counts the Python instructions that a thread executes: the same number in each run, unlike seconds."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1] / "clusterddp"


class Instructions:
    """The instructions of clusterddp, and of what it calls, in this thread while ``counting``, by the module of
    clusterddp that called. Work inside C functions does not count."""

    def __init__(self) -> None:
        self.counting = False
        self.by_module: Counter[str] = Counter()
        #: The traced frames that run now, by their ids, and their modules. A frame that is kept may crash the next
        #: garbage collection (Python 3.11.2).
        self._running: list[tuple[int, str]] = []
        self._before: Any = None

    def __enter__(self) -> Instructions:
        self._before = sys.gettrace()
        gc.disable()  # Python 3.11.2 may crash if it collects garbage inside a trace function
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)
        gc.enable()

    def _on_call(self, frame: FrameType, _event: str, _argument: Any) -> Callable[..., Any] | None:
        path = Path(frame.f_code.co_filename)
        caller, module = self._running[-1] if self._running else (0, "")
        if path.is_relative_to(PACKAGE):
            module = path.relative_to(PACKAGE).as_posix()
        elif caller != id(frame.f_back):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._running.append((id(frame), module))

        def on_event(frame: FrameType, event: str, _argument: Any) -> Callable[..., Any]:
            if event == "opcode":
                self.by_module[module] += self.counting
            elif event == "return":
                self._running.pop()
            return on_event

        return on_event
