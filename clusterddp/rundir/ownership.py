"""Who owns a run's files: refuses those that a different user may have written or could replace.

clusterddp does not execute them, and reaches the files of a run through its folder, which it keeps open (``hold_run``).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from clusterddp.errors import RunDirectoryError
from clusterddp.reporter import say
from clusterddp.rundir.files import exists, hold, names_in
from clusterddp.rundir.files import status as status_of
from clusterddp.rundir.records import read_json, retrying
from clusterddp.rundir.run_directory import RunDirectory

_START_YOUR_OWN = "Start your own run. To continue from another user's checkpoint, use --fork"


def hold_run(run: RunDirectory, inode: int | None = None, attempt: int | None = None, *, reopen: bool = True) -> None:
    """Opens the run's folder, so that this process reaches the run's files through it from now on (``files.hold``).

    Raises RunDirectoryError if the folder belongs to a different user, as one that was put in its place does.
    ``inode``: that of the folder which the supervisor of ``attempt`` holds. A folder that does not exist passes.
    """
    try:
        found = retrying(run.path, lambda: hold(run.path, reopen=reopen))
        link = os.lstat(run.path) if found is not None else None
    except FileNotFoundError:
        found = link = None
    except NotADirectoryError as error:
        raise RunDirectoryError(f"{run} is not a folder. Choose a different run directory") from error
    if found is None or link is None:
        return
    for status in (found, link):  # the same, unless it is a symbolic link
        if status.st_uid not in (os.geteuid(), 0):
            raise RunDirectoryError(_of_another(run.path, status, _START_YOUR_OWN))
    if inode is not None and attempt is not None and found.st_ino != inode and not _holds(run, inode, attempt):
        raise RunDirectoryError(
            f"{run} was replaced by another folder while the run was training, so this process does not use it. Put "
            f"the run's own folder back, and continue it with `clusterddp submit --run-dir {run.quoted}`"
        )


def _holds(run: RunDirectory, inode: int, attempt: int) -> bool:
    """Whether the supervisor that sees the run's folder with this inode has put its claim there. File systems of FUSE,
    such as sshfs and gcsfuse, number the same folder differently on each node."""
    claim = read_json(run.holder_file(attempt)) or {}
    return isinstance(written_for := claim.get("run"), dict) and written_for.get("inode") == inode


def check_run(run: RunDirectory) -> None:
    """Raises RunDirectoryError if a different user may have written, or could replace, what the run executes.

    Holds the run's folder, which others therefore cannot replace after this check.
    """
    hold_run(run, reopen=False)
    check_owner(run.path)
    closed = exists(run.path) and status_of(run.path).st_mode & 0o077 == 0
    snapshots = [run.code / name for name in names_in(run.code)] if exists(run.code) else []
    for path in (run.private, run.logs, run.checkpoints, run.job_file, run.batch_script, run.code, *snapshots):
        check_owner(path, closed)


def warn_of_replaceable(path: Path) -> None:
    """Prints a warning if other users may rename a new run directory, and put their own in its place.

    clusterddp does not use one that is not the user's, but Slurm, Python's imports and W&B open files by their path.
    """
    folder = path.parent
    mode = folder.stat().st_mode
    if mode & 0o022 and not mode & stat.S_ISVTX:
        say(
            f"other users can write to {folder}, and so replace {path} by their own folder while it trains. To prevent "
            f"that, its owner can run: chmod +t {folder}"
        )


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
                f"{path} is a symbolic link that belongs to user {status.st_uid}, not to user {os.geteuid()}. Choose "
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


def check_owner(path: Path, closed: bool = False) -> None:
    """Raises RunDirectoryError unless a file or folder belongs to this user or root and is closed to other writers.

    A path that does not exist passes. ``closed``: it is inside a folder that only this user can enter, so that its own
    mode does not matter.
    """
    if why := why_foreign(path, _START_YOUR_OWN, closed):
        raise RunDirectoryError(why)


def why_foreign(path: Path, instead: str, closed: bool = False) -> str | None:
    """The message of ``check_owner``. None if the path passes. ``instead``: the remedy if it belongs to a different
    user."""
    try:
        status = status_of(path)
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
