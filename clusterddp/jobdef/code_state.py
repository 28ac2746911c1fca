"""The state of the code and the versions that an attempt uses, for the history."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clusterddp.jobdef.checkout import repository_state
from clusterddp.jobdef.job import Job

RECORDED_PACKAGES = ("clusterddp", "torch", "numpy")


def code_state(job: Job, submitted: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The state of the script's folder and the versions. ``commit`` and ``changes`` are None outside a git checkout.

    ``submitted``: of an attempt that uses a snapshot, the state of the repository when it was taken, with its name.
    """
    state = submitted or repository_state(Path(job.script).parent if job.script else Path.cwd())
    return {
        **state,
        "script": _hash_of(Path(job.script)) if job.script else None,
        "python": platform.python_version(),
        **{name: _version(name) for name in RECORDED_PACKAGES},
    }


def changed_code(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """One entry per difference: ``torch 2.12.0 -> 2.13.0``. Only one of two attempts may have used a snapshot."""
    compared = (name for name in after if name != "snapshot" or name in before)
    return [f"{name} {before.get(name)} -> {after[name]}" for name in compared if before.get(name) != after[name]]


def _hash_of(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError:
        return None


def _version(package: str) -> str | None:
    import importlib.metadata  # slow to import, and a report does not need it

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
