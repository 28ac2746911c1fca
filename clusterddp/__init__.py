"""clusterddp trains PyTorch DistributedDataParallel models on Slurm clusters, and a preemption costs next to nothing.

A training script needs ``clusterddp.init()``; everything else hangs on the context that it returns. Importing this
package imports no torch: the command line must answer at once, and runs on login nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clusterddp.api import Handle as Handle
    from clusterddp.api import launch as launch
    from clusterddp.checkpoint.checkpoint_folder import CheckpointFolder as CheckpointFolder
    from clusterddp.errors import Stopped as Stopped
    from clusterddp.training.context import Context as Context
    from clusterddp.training.context import init as init

__version__ = "0.1.0"
__all__ = ["CheckpointFolder", "Context", "Handle", "Stopped", "__version__", "init", "launch"]

_HOMES = {
    "CheckpointFolder": "clusterddp.checkpoint.checkpoint_folder",
    "Context": "clusterddp.training.context",
    "Handle": "clusterddp.api",
    "init": "clusterddp.training.context",
    "launch": "clusterddp.api",
    "Stopped": "clusterddp.errors",
}


def __getattr__(name: str) -> Any:
    """Imports the module that a name is in when it is first used: only the training modules import torch."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'clusterddp' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
