"""Train PyTorch DistributedDataParallel models on Slurm, through preemptions, time limits, crashes and dead nodes.

A training script calls ``clusterddp.init()`` and uses the context that it returns. ``clusterddp.launch()`` starts runs
from Python. Importing this package does not import torch, which login nodes and the command line do not need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterddp.version import __version__

if TYPE_CHECKING:
    from clusterddp import environment as environment
    from clusterddp import errors as errors
    from clusterddp import orders as orders
    from clusterddp.api import Handle as Handle
    from clusterddp.api import Status as Status
    from clusterddp.api import launch as launch
    from clusterddp.api import sweep as sweep
    from clusterddp.checkpoint.restore import CheckpointFolder
    from clusterddp.data.loader import EvalLoader as EvalLoader
    from clusterddp.data.loader import Loader as Loader
    from clusterddp.errors import Stopped as Stopped
    from clusterddp.jobdef.job import Checkpointing as Checkpointing
    from clusterddp.jobdef.job import Keep as Keep
    from clusterddp.training.context import Context as Context
    from clusterddp.training.context import init as init
    from clusterddp.training.loop import Run as Run
    from clusterddp.training.script_loop import continue_epoch as continue_epoch
    from clusterddp.training.script_loop import requeue as requeue
    from clusterddp.training.script_loop import stop_requested as stop_requested

__all__ = [
    "CheckpointFolder",
    "Checkpointing",
    "Context",
    "EvalLoader",
    "Handle",
    "Keep",
    "Loader",
    "Run",
    "Status",
    "Stopped",
    "__version__",
    "continue_epoch",
    "environment",
    "errors",
    "init",
    "launch",
    "orders",
    "requeue",
    "stop_requested",
    "sweep",
]

#: The public names, each with the module that defines it.
_HOMES = {
    "CheckpointFolder": "clusterddp.checkpoint.restore",
    "Checkpointing": "clusterddp.jobdef.job",
    "Context": "clusterddp.training.context",
    "EvalLoader": "clusterddp.data.loader",
    "Handle": "clusterddp.api",
    "Keep": "clusterddp.jobdef.job",
    "Loader": "clusterddp.data.loader",
    "Run": "clusterddp.training.loop",
    "Status": "clusterddp.api",
    "Stopped": "clusterddp.errors",
    "continue_epoch": "clusterddp.training.script_loop",
    "init": "clusterddp.training.context",
    "launch": "clusterddp.api",
    "requeue": "clusterddp.training.script_loop",
    "stop_requested": "clusterddp.training.script_loop",
    "sweep": "clusterddp.api",
}
_MODULES = ("environment", "errors", "orders")


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
