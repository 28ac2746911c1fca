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
        self._modules: dict[FrameType, str] = {}
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
        own = path.is_relative_to(PACKAGE)
        module = (
            path.relative_to(PACKAGE).as_posix() if own else self._modules.get(frame.f_back) if frame.f_back else None
        )
        if module is None:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._modules[frame] = module

        def on_event(frame: FrameType, event: str, _argument: Any) -> Callable[..., Any]:
            if event == "opcode":
                self.by_module[module] += self.counting
            elif event == "return":
                self._modules.pop(frame, None)
            return on_event

        return on_event
