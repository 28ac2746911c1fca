"""Refuses to execute files that a different user may have written.

Also deletes old logs of a run, without following symbolic links or deleting files of other users.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from clusterddp.errors import RunDirectoryError
from clusterddp.reporter import say
from clusterddp.rundir.records import retrying
from clusterddp.rundir.run_directory import RunDirectory

_START_YOUR_OWN = "Start your own run. To continue from a different user's checkpoint, use --fork"


def check_run(run: RunDirectory) -> None:
    """Raises RunDirectoryError if a different user may have written, or could replace, what the run executes."""
    check_own(run.path)
    closed = run.path.exists() and run.path.stat().st_mode & 0o077 == 0
    snapshots = run.code.iterdir() if run.code.is_dir() else ()
    for path in (run.private, run.logs, run.checkpoints, run.job_file, run.batch_script, run.code, *snapshots):
        check_own(path, closed)


def check_place(path: Path) -> None:
    """Raises RunDirectoryError unless a run or a sweep may be recorded at ``path``. Only looks.

    A user who can write the folder around it may have put a file there first. A path that does not exist passes if its
    folders can be created.
    """
    found = next(place for place in (path, *path.parents) if os.path.lexists(place))
    status = found.lstat()
    if stat.S_ISLNK(status.st_mode):
        if found == path and status.st_uid not in (os.geteuid(), 0):
            raise RunDirectoryError(
                f"{path} is a symbolic link that belongs to user {status.st_uid}, expected user {os.geteuid()}. Choose "
                "a different run directory"
            )
        if not found.exists():
            raise RunDirectoryError(
                f"{found} is a symbolic link to {found.readlink()}, which does not exist. Create that folder, or "
                "remove the link"
            )
    if not found.is_dir():
        raise RunDirectoryError(f"{found} is not a folder. Choose a different run directory")
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
    """Raises RunDirectoryError unless a file or folder belongs to this user or root and is closed to other writers.

    A path that does not exist passes. ``closed``: it is inside a folder that only this user can enter, so that its own
    mode does not matter.
    """
    if why := why_foreign(path, _START_YOUR_OWN, closed):
        raise RunDirectoryError(why)


def why_foreign(path: Path, instead: str, closed: bool = False) -> str | None:
    """The message of ``check_own``. None if the path passes. ``instead``: the remedy if it belongs to a different
    user."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    mode = f"{stat.S_IMODE(status.st_mode):04o}"
    if status.st_uid not in (os.geteuid(), 0):
        return _of_another(path, status, instead)
    if status.st_mode & 0o022 and not closed:
        return (
            f"{path} (user {status.st_uid}, mode {mode}) can be written by others, but clusterddp executes its "
            "contents. Expected write permission only for the owner. If you trust the contents, run: chmod -R go-w "
            f"{path}"
        )
    return None


def _of_another(path: Path, status: os.stat_result, instead: str) -> str:
    return (
        f"{path} belongs to user {status.st_uid} (mode {stat.S_IMODE(status.st_mode):04o}), but clusterddp executes "
        f"its contents. Expected user {os.geteuid()} or root. {instead}"
    )


def old_logs(run: RunDirectory, keep: int) -> list[int]:
    """The attempts with logs that are neither the run's first nor among its ``keep`` newest, ascending."""
    attempts = run.attempts()
    old = attempts[1:-keep]
    if not old:
        return []
    present = set(retrying(run.logs, lambda: os.listdir(run.logs)))
    return [number for number in old if run.attempt_logs(number).name in present]


def delete_old_logs(run: RunDirectory, keep: int) -> None:
    """Deletes the logs of ``old_logs``. Errors are only reported, because the next attempt tries again.

    The numbers of attempts remain: the newest attempt keeps its folder, and all have one in ``private``.
    """
    try:
        for number in old_logs(run, keep):
            delete_folder(run.attempt_logs(number))
    except OSError as error:
        say(f"could not delete old logs in {run.logs}: {error.strerror}")


def delete_folder(folder: Path) -> None:
    """Deletes a folder and all in it. Symbolic links are deleted, not followed. A link in place of the folder stays.

    Raises PermissionError at the first file of a different user. A file that disappears meanwhile is no error.
    """
    for _, folders, files, descriptor in os.fwalk(folder, topdown=False):
        for name in (*files, *folders):
            with suppress(FileNotFoundError):
                _delete(name, descriptor)
    with suppress(FileNotFoundError):
        if not folder.is_symlink():
            folder.rmdir()


def _delete(name: str, folder: int) -> None:
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if status.st_uid != os.geteuid():
        raise PermissionError(1, "belongs to a different user", name)
    if stat.S_ISDIR(status.st_mode):
        os.rmdir(name, dir_fd=folder)
    else:
        os.unlink(name, dir_fd=folder)


def size_of(folder: Path) -> int:
    """The bytes in a folder's files. Links are not followed."""
    return sum(
        os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_size
        for _, _, files, descriptor in os.fwalk(folder)
        for name in files
    )
