"""clusterddp trains PyTorch DistributedDataParallel models on Slurm clusters, and a preemption costs next to nothing.

A training script needs ``clusterddp.init()``; everything else hangs on the context that it returns. Importing this
package imports no torch: the command line must answer at once, and runs on login nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clusterddp.errors import Stopped as Stopped
    from clusterddp.training.context import Context as Context
    from clusterddp.training.context import init as init
    from clusterddp.training.standalone import CheckpointFolder as CheckpointFolder

__version__ = "0.1.0"
__all__ = ["CheckpointFolder", "Context", "Stopped", "__version__", "init"]

_TRAINING = {
    "CheckpointFolder": "clusterddp.training.standalone",
    "Context": "clusterddp.training.context",
    "init": "clusterddp.training.context",
    "Stopped": "clusterddp.errors",
}


def __getattr__(name: str) -> Any:
    """Loads the training half, and torch with it, when the first of its names is used."""
    if name not in _TRAINING:
        raise AttributeError(f"module 'clusterddp' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_TRAINING[name]), name)
