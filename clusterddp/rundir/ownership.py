"""Ownership: refuses to execute what another user may have written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from clusterddp.errors import RunDirectoryError
from clusterddp.rundir.run_directory import RunDirectory

_START_YOUR_OWN = "Start your own run; --fork continues from another user's checkpoint"


def check_run(run: RunDirectory) -> None:
    """Raises RunDirectoryError if another user may have written, or could replace, what the run executes."""
    check_own(run.path)
    closed = run.path.exists() and run.path.stat().st_mode & 0o077 == 0
    snapshots = run.code.iterdir() if run.code.is_dir() else ()
    for path in (run.private, run.logs, run.checkpoints, run.job_file, run.batch_script, run.code, *snapshots):
        check_own(path, closed)


def check_place(path: Path) -> None:
    """Raises RunDirectoryError unless a run or a sweep may be recorded at ``path``; changes nothing.

    Whoever can write the folder around it may have put something there first. A path that does not exist passes if its
    folders can be created.
    """
    found = next(place for place in (path, *path.parents) if os.path.lexists(place))
    status = found.lstat()
    if stat.S_ISLNK(status.st_mode):
        if found == path and status.st_uid not in (os.geteuid(), 0):
            raise RunDirectoryError(
                f"{path} is a symbolic link that belongs to user {status.st_uid}, expected user {os.geteuid()}: choose "
                "another run directory"
            )
        if not found.exists():
            raise RunDirectoryError(
                f"{found} is a symbolic link to {found.readlink()}, which does not exist: create that folder, or "
                "remove the link"
            )
    if not found.is_dir():
        raise RunDirectoryError(f"{found} is not a folder: choose another run directory")
    status = found.stat()
    if found == path and status.st_uid not in (os.geteuid(), 0):
        raise RunDirectoryError(_of_another(path, status, _START_YOUR_OWN))


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
    if why := why_foreign(path, _START_YOUR_OWN, closed):
        raise RunDirectoryError(why)


def why_foreign(path: Path, instead: str, closed: bool = False) -> str | None:
    """The message of ``check_own``; None if the path passes. ``instead``: what to do if it belongs to another user."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    mode = f"{stat.S_IMODE(status.st_mode):04o}"
    if status.st_uid not in (os.geteuid(), 0):
        return _of_another(path, status, instead)
    if status.st_mode & 0o022 and not closed:
        return (
            f"{path} (user {status.st_uid}, mode {mode}) can be written by others, but clusterddp executes what is in "
            f"it: expected write permission for the owner alone. If you trust the contents: chmod -R go-w {path}"
        )
    return None


def _of_another(path: Path, status: os.stat_result, instead: str) -> str:
    return (
        f"{path} belongs to user {status.st_uid} (mode {stat.S_IMODE(status.st_mode):04o}), but clusterddp executes "
        f"what is in it: expected user {os.geteuid()} or root. {instead}"
    )
