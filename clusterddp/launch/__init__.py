"""The launch half: what runs on login nodes and in batch steps, without torch. Calling it launches a run.

``clusterddp.launch(...)`` is the Python call (``clusterddp.api.launch``), and ``clusterddp.launch`` is this package,
whatever was imported first: the import system sets that name to the package, so the package itself can be called.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        """``clusterddp.api.launch``."""
        from clusterddp.api import launch

        return launch(*args, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by its name, as other modules are: a function that is launched may refer to it."""
        return import_module, (self.__name__,)


sys.modules[__name__].__class__ = _CallablePackage
