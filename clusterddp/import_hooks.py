"""Changes libraries that a rank's script uses, as soon as it imports them: torch, its optimizers, MLflow.

A change must be in place before the script runs ``from torch import save``. The entry point of a rank must not import
torch itself, because a script may set variables that torch reads when it is imported, or need no torch at all. A
library is therefore changed when it has been imported, before the code that imports it continues.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from clusterddp.reporter import say

Act = Callable[[ModuleType], None]


def when_imported(name: str, act: Act) -> None:
    """Calls ``act`` with the module once it is imported, or at once if it is. An error of ``act`` is only reported."""
    if name in sys.modules:
        _act(act, sys.modules[name])
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.waiting.setdefault(name, []).append(act)


class _Finder:
    """Finds the awaited modules as the other finders do, and extends what their loaders execute.

    Looking for a module does not import it (``importlib.util.find_spec``), so it is awaited until it is executed.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, list[Act]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """For the import system."""
        if name not in self.waiting:
            return None
        finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path if finder is not self)
        specs = (find(name, path, target) for find in finders if find is not None)
        spec = next((spec for spec in specs if spec is not None), None)
        loader = spec.loader if spec is not None else None
        if loader is None or not hasattr(loader, "exec_module"):
            return spec
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for act in self.waiting.pop(name, ()):
                _act(act, module)

        loader.exec_module = exec_module  # each spec has its own loader
        return spec


_finder = _Finder()


def _act(act: Act, module: ModuleType) -> None:
    try:
        act(module)
    except Exception as error:  # of a different version of the module: the script runs without the change
        name = " ".join(filter(None, (module.__name__, getattr(module, "__version__", None))))
        say(f"could not patch {name}, so the script runs without this patch: {error!r}")
