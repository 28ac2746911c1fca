"""Counts the steps of a script that does not use clusterddp: torch calls us after each step of any optimizer.

In a process that the script starts with multiprocessing, only the first step is noted, in a file.
"""

from __future__ import annotations

import importlib
import os
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


class _StepHook:
    """The hook of this process. ``handle``: torch's, to remove it. ``child_file``: where a forked child notes its first
    step."""

    handle: Any = None
    child_file: Path | None = None


_hook = _StepHook()


def watch_optimizers(child_file: Path | None = None) -> None:
    """Counts the steps of this process from now on. A hook that fails is removed."""
    _hook.child_file = child_file
    when_imported("torch", _register)


def unwatch_optimizers() -> None:
    """Ends ``watch_optimizers``."""
    if _hook.handle is not None:
        _hook.handle.remove()
        _hook.handle = None


def note_first_step(file: Path) -> None:
    """Has this process, which is no rank, create ``file`` after the first step of an optimizer."""

    def register(_torch: ModuleType) -> None:
        def hook(*_: Any) -> None:
            handle.remove()
            with suppress(OSError):
                file.touch()

        handle = _after_each_step(hook)

    when_imported("torch", register)


def _register(torch: ModuleType) -> None:
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
            unwatch_optimizers()
            say(f"steps are not counted in this attempt, because the optimizer hook failed: {error!r}")

    _hook.handle = _after_each_step(hook)


def _after_each_step(hook: Callable[..., None]) -> Any:
    return sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(hook)


def _watch_in_child() -> None:
    unwatch_optimizers()
    if _hook.child_file is not None:
        note_first_step(_hook.child_file)


os.register_at_fork(after_in_child=_watch_in_child)
