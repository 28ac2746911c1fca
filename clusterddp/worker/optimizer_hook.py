"""Counts the steps of a script that does not use clusterddp: torch calls us after each step of any optimizer.

In a process that the script starts with multiprocessing, only the first step is noted, in a file.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from clusterddp.import_hooks import when_imported
from clusterddp.reporter import say

#: The module that counts the steps. It is imported by name at the first step, because only then it is certain that the
#: script trains with torch in this process. It belongs to the training half, with torch.
_STEPS = "clusterddp.training.script_steps"


class OptimizerHook:
    """Counts the steps of the optimizers in this process."""

    def __init__(self) -> None:
        #: torch's, to remove it.
        self._handle: Any = None
        #: Where a forked child notes its first step.
        self._child_file: Path | None = None

    def begin(self, child_file: Path | None = None) -> None:
        """Adds the hook once torch is imported. If it fails, it is removed. ``child_file``: where a forked child notes
        its first step."""
        self._child_file = child_file
        when_imported("torch", self._register)

    def end(self) -> None:
        """Removes the hook."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _register(self, torch: ModuleType) -> None:
        is_compiling = torch.compiler.is_compiling
        note: Callable[[Any], None] | None = None

        def hook(optimizer: Any, _args: Any, _options: Any) -> None:
            nonlocal note
            if is_compiling():  # torch.compile would make this part of the compiled step, or fail to compile it
                return
            try:
                note = note or importlib.import_module(_STEPS).on_optimizer_step
                note(optimizer)
            except Exception as error:
                self.end()
                say(f"steps are not counted in this attempt, because the optimizer hook failed: {error!r}")

        self._handle = _after_each_step(hook)

    def in_forked_child(self) -> None:
        """From now on, only the child's first step is noted."""
        self.end()
        if self._child_file is not None:
            note_first_step(self._child_file)


def note_first_step(file: Path) -> None:
    """Has this process, which is no rank, create ``file`` after the first step of an optimizer."""

    def register(_torch: ModuleType) -> None:
        def hook(*_: Any) -> None:
            handle.remove()
            with suppress(OSError):
                file.touch()

        handle = _after_each_step(hook)

    when_imported("torch", register)


def _after_each_step(hook: Callable[..., None]) -> Any:
    return sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(hook)
