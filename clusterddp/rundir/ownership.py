"""Ownership: refuses to execute what another user may have written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from clusterddp.errors import RunDirectoryError
from clusterddp.rundir.run_directory import RunDirectory


def check_run(run: RunDirectory) -> None:
    """Raises RunDirectoryError if another user may have written, or could replace, what the run executes."""
    check_own(run.path)
    closed = run.path.exists() and run.path.stat().st_mode & 0o077 == 0
    snapshots = run.code.iterdir() if run.code.is_dir() else ()
    for path in (run.private, run.logs, run.checkpoints, run.job_file, run.batch_script, run.code, *snapshots):
        check_own(path, closed)


def owner_of(path: Path) -> str:
    """The name of a path's owner, or ``user 1234`` for one without a name, as in a container."""
    try:
        return path.owner()
    except KeyError:
        return f"user {path.stat().st_uid}"


def check_own(path: Path, closed: bool = False) -> None:
    """Raises RunDirectoryError unless a file or folder belongs to this user or root and nobody else may write it.

    A path that does not exist passes. ``closed``: it is inside a folder that nobody else can enter, so that its own
    mode does not matter.
    """
    if why := why_foreign(path, "Start your own run; --fork continues from another user's checkpoint", closed):
        raise RunDirectoryError(why)


def why_foreign(path: Path, instead: str, closed: bool = False) -> str | None:
    """The message of ``check_own``; None if the path passes. ``instead``: what to do if it belongs to another user."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    mode = f"{stat.S_IMODE(status.st_mode):04o}"
    if status.st_uid not in (os.geteuid(), 0):
        return (
            f"{path} belongs to user {status.st_uid} (mode {mode}), but clusterddp executes what is in it: expected "
            f"user {os.geteuid()} or root. {instead}"
        )
    if status.st_mode & 0o022 and not closed:
        return (
            f"{path} (user {status.st_uid}, mode {mode}) can be written by others, but clusterddp executes what is in "
            f"it: expected write permission for the owner alone. If you trust the contents: chmod -R go-w {path}"
        )
    return None
