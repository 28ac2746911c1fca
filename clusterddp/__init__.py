"""Train PyTorch DistributedDataParallel models on Slurm, through preemptions, time limits, crashes and dead nodes.

A training script calls ``clusterddp.init()`` and uses the context that it returns. ``clusterddp.launch()`` starts runs
from Python. Importing this package does not import torch, which login nodes and the command line do not need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clusterddp import orders as orders
    from clusterddp import streams as streams
    from clusterddp.api import Handle as Handle
    from clusterddp.api import launch as launch
    from clusterddp.api import sweep as sweep
    from clusterddp.checkpoint.checkpoint_folder import CheckpointFolder as CheckpointFolder
    from clusterddp.errors import Stopped as Stopped
    from clusterddp.training.context import Context as Context
    from clusterddp.training.context import init as init
    from clusterddp.training.script_loop import continue_epoch as continue_epoch
    from clusterddp.training.script_loop import requeue as requeue
    from clusterddp.training.script_loop import stop_requested as stop_requested

__version__ = "0.1.0"
__all__ = [
    "CheckpointFolder",
    "Context",
    "Handle",
    "Stopped",
    "__version__",
    "continue_epoch",
    "init",
    "launch",
    "orders",
    "requeue",
    "stop_requested",
    "streams",
    "sweep",
]

_HOMES = {
    "CheckpointFolder": "clusterddp.checkpoint.checkpoint_folder",
    "Context": "clusterddp.training.context",
    "Handle": "clusterddp.api",
    "continue_epoch": "clusterddp.training.script_loop",
    "init": "clusterddp.training.context",
    "launch": "clusterddp.api",
    "requeue": "clusterddp.training.script_loop",
    "stop_requested": "clusterddp.training.script_loop",
    "sweep": "clusterddp.api",
    "Stopped": "clusterddp.errors",
}
_MODULES = {"orders", "streams"}


def __getattr__(name: str) -> Any:
    """Import a public name's module on first use, because only some of them need torch."""
    from importlib import import_module

    if name in _MODULES:
        return import_module(f"clusterddp.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'clusterddp' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names, without the modules that happen to be imported."""
    return sorted(__all__)
