"""Packages that a key of the job definition needs, and that an installation may lack."""

from __future__ import annotations

from importlib.util import find_spec

from clusterddp.errors import UsageError
from clusterddp.jobdef.job import Job


def check_packages(job: Job) -> None:
    """Raises UsageError if this interpreter lacks the package of a tracker that the job has."""
    for key, wanted in (("tensorboard", job.tensorboard), ("wandb", job.wandb is not None)):
        if wanted and not _installed(key):
            how = f"run `pip install 'clusterddp[{key}]'`, or set {key}=false"
            raise UsageError(f"{key}: the package {key!r} is not installed: {how}")


def _installed(package: str) -> bool:
    """A folder of the same name is no package: wandb writes to ``./wandb``."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None
