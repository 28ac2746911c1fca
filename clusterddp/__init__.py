"""clusterddp trains PyTorch DistributedDataParallel models on Slurm clusters, and a preemption costs next to nothing.

A training script needs ``clusterddp.init()``; everything else hangs on the context that it returns. Importing this
package imports no torch: the command line must answer at once, and runs on login nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clusterddp.api import Handle as Handle
    from clusterddp.api import launch as launch
    from clusterddp.errors import Stopped as Stopped
    from clusterddp.training.context import Context as Context
    from clusterddp.training.context import init as init
    from clusterddp.training.standalone import CheckpointFolder as CheckpointFolder

__version__ = "0.1.0"
__all__ = ["CheckpointFolder", "Context", "Handle", "Stopped", "__version__", "init", "launch"]

_HOMES = {
    "CheckpointFolder": "clusterddp.training.standalone",
    "Context": "clusterddp.training.context",
    "Handle": "clusterddp.api",
    "init": "clusterddp.training.context",
    "Stopped": "clusterddp.errors",
}


def __getattr__(name: str) -> Any:
    """Loads the half that a name belongs to when it is first used: torch comes with the training half alone."""
    from importlib import import_module

    if name == "launch":
        return import_module("clusterddp.launch")  # the package can be called
    if name not in _HOMES:
        raise AttributeError(f"module 'clusterddp' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
