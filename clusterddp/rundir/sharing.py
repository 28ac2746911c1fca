"""Permissions: opens a run to its group or closes it, and keeps ``private`` closed to others."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from clusterddp.errors import RunDirectoryError


def share_run(top: Path, share: str, closed: Path) -> None:
    """Opens the run's folder ``top`` to its group (``share`` is "group") or closes it ("private"); not ``closed``.

    Only this user's own folders and files change. Symbolic links and hard links may lead outside the run and are left
    unchanged; an executable file stays executable. Raises RunDirectoryError if a mode cannot be changed; calling again
    continues where it failed.
    """
    mode = 0o2750 if share == "group" else 0o700
    if stat.S_IMODE(top.stat().st_mode) == mode:
        return
    try:
        if share != "group":
            top.chmod(mode)  # first, so that nobody enters while the walk is under way
        for folder, folders, files, descriptor in os.fwalk(top, onerror=_raise):
            folders[:] = [name for name in folders if Path(folder, name) != closed]
            for name in (*folders, *files):
                _share(descriptor, name, mode)
        if share == "group":
            top.chmod(mode)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise RunDirectoryError(f"cannot change the permissions of {top}{where}: {error.strerror}") from error


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _share(folder: int, name: str, mode: int) -> None:
    """Changes the mode of one entry of an open folder, through a descriptor that no link can redirect."""
    try:
        descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:  # deleted meanwhile
        return
    entry = Path(f"/proc/self/fd/{descriptor}")  # fchmod refuses O_PATH descriptors
    try:
        status = os.fstat(descriptor)
        own = status.st_uid == os.geteuid()
        if own and stat.S_ISDIR(status.st_mode):
            entry.chmod(mode)
        elif own and stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            executable = (0o700 | mode) & 0o111 if status.st_mode & 0o100 else 0
            entry.chmod(mode & 0o044 | 0o600 | executable)
    finally:
        os.close(descriptor)


def make_private(path: Path) -> None:
    """Creates a folder for tokens and pickles that only its owner can enter, or closes an existing one.

    Raises RunDirectoryError if the folder belongs to another user or is a symbolic link.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except NotADirectoryError as error:
        raise RunDirectoryError(f"{path} is a symbolic link; expected a folder of this run: remove the link") from error
    except PermissionError as error:
        raise RunDirectoryError(f"{path} cannot be opened by user {os.geteuid()}: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if status.st_uid not in (os.geteuid(), 0):
            raise RunDirectoryError(
                f"{path} belongs to user {status.st_uid}, expected user {os.geteuid()}: choose another run directory"
            )
        if stat.S_IMODE(status.st_mode) & 0o777 != 0o700 and status.st_uid == os.geteuid():
            os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & 0o7000 | 0o700)
    finally:
        os.close(descriptor)
