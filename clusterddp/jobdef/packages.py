"""Packages that a key of the job definition needs, and that an installation may lack."""

from __future__ import annotations

from importlib.util import find_spec

from clusterddp.errors import UsageError
from clusterddp.jobdef.job import Job


def check_packages(job: Job) -> None:
    """Raises UsageError if this interpreter lacks the packages of trackers that the job has."""
    asked = {"tensorboard": job.tensorboard, "wandb": job.wandb, "mlflow": job.mlflow}
    wanted = [key for key, value in asked.items() if value]
    if missing := [key for key in wanted if not _installed(key)]:
        named = "; ".join(f"{key}: the package {key!r} is not installed" for key in missing)
        unless = " and ".join(f"{key}=false" for key in missing)
        raise UsageError(f"{named}: run `pip install 'clusterddp[{','.join(missing)}]'`, or set {unless}")


def _installed(package: str) -> bool:
    """A folder of the same name is no package: wandb writes to ``./wandb``."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None
