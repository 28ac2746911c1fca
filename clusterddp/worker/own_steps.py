"""Has torch call us after each step of any optimizer, for a script that does not use clusterddp.

What is made of it is in ``training/script_steps.py``, which is imported at the first step: only then is it known that
the script trains with torch, in this process. A hook that fails is removed: the script goes on as without it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from clusterddp.reporter import say
from clusterddp.worker.import_hook import when_imported

#: Imported by name: it belongs to the script's half of the process, with torch.
_STEPS = "clusterddp.training.script_steps"
_handle: Any = None


def watch() -> None:
    """From now on; torch need not be imported yet."""
    when_imported("torch", _register)


def stop() -> None:
    """No longer."""
    global _handle
    if _handle is not None:
        _handle.remove()
        _handle = None


def _register(torch: ModuleType) -> None:
    global _handle
    is_compiling = torch.compiler.is_compiling
    note: Callable[[Any], None] | None = None

    def hook(optimizer: Any, _args: Any, _options: Any) -> None:
        nonlocal note
        if is_compiling():  # torch.compile would make this a part of the compiled step, or refuse to compile it
            return
        try:
            note = note or importlib.import_module(_STEPS).on_optimizer_step
            note(optimizer)
        except Exception as error:
            stop()
            say(f"steps are not counted in this attempt: {error!r}")

    _handle = sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(hook)


os.register_at_fork(after_in_child=stop)
