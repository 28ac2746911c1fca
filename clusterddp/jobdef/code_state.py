"""Which code an attempt runs: the commit, a hash of uncommitted changes, and the versions of packages."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clusterddp.jobdef.job import Job

PACKAGES = ("clusterddp", "torch", "numpy")


def code_state(job: Job, submitted: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The state of the script's folder and the versions; ``commit`` and ``changes`` are None outside a git checkout.

    ``submitted``: of an attempt that uses a snapshot, the state of the repository when it was taken, with its name.
    """
    state = submitted or repository_state(Path(job.script).parent if job.script else Path.cwd())
    return {
        **state,
        "script": _hash_of(Path(job.script)) if job.script else None,
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def repository_state(folder: Path) -> dict[str, str | None]:
    """The commit of the repository that ``folder`` is in, and a hash of its uncommitted changes."""
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain=v1", "-z") if commit else None
    if commit and changes:
        changes += _git(folder, "diff", "HEAD") or ""
    return {
        "commit": commit.strip() if commit else None,
        "changes": hashlib.sha256(changes.encode(errors="surrogateescape")).hexdigest()[:12] if changes else None,
    }


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """One entry per difference: ``torch 2.12.0 -> 2.13.0``. Only one of two attempts may have used a snapshot."""
    compared = (name for name in after if name != "snapshot" or name in before)
    return [f"{name} {before.get(name)} -> {after[name]}" for name in compared if before.get(name) != after[name]]


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, errors="replace", timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None


def _hash_of(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError:
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
