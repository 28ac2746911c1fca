"""Who may read a run: the modes of what is in its folder, set without following a symbolic link out of it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from clusterddp.errors import RunDirectoryError


def share_tree(top: Path, mode: int, closed: Path) -> None:
    """Gives the run's folder ``top`` this mode, and all that is in it the matching ones, except in ``closed``.

    Only this user's own folders and files change. Symbolic links, and files with another name elsewhere (hard links),
    may belong to something outside the run and stay as they are; a file that is executable stays so. RunDirectoryError
    where a mode cannot be changed: the same call again does the rest.
    """
    opens = bool(mode & 0o077)
    try:
        if not opens:
            top.chmod(mode)  # first, so that nobody reads what is still open in it
        for folder, folders, files, descriptor in os.fwalk(top, onerror=_raise):
            folders[:] = [name for name in folders if Path(folder, name) != closed]
            for name in (*folders, *files):
                _share(descriptor, name, mode)
        if opens:
            top.chmod(mode)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise RunDirectoryError(f"cannot change who may read {top}{where}: {error.strerror}") from error


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _share(folder: int, name: str, mode: int) -> None:
    """Changes the mode of one entry of an open folder, through a descriptor that no link can redirect."""
    try:
        descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:  # deleted meanwhile
        return
    entry = Path(f"/proc/self/fd/{descriptor}")  # fchmod does not take a descriptor of this kind
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            return
        if stat.S_ISDIR(status.st_mode):
            entry.chmod(mode)
        elif stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            executable = (0o700 | mode) & 0o111 if status.st_mode & 0o100 else 0
            entry.chmod(mode & 0o044 | 0o600 | executable)
    finally:
        os.close(descriptor)


def make_private(path: Path) -> None:
    """Makes a folder that nobody else may enter, or closes one that is there.

    RunDirectoryError for one that somebody else has made, or put a link in its place: it is to hold tokens and pickles.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except NotADirectoryError as error:
        raise RunDirectoryError(f"{path} is a symbolic link; expected a folder of the run's own") from error
    except PermissionError as error:
        raise RunDirectoryError(f"{path} cannot be opened by user {os.geteuid()}: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if status.st_uid not in (os.geteuid(), 0):
            raise RunDirectoryError(
                f"{path} belongs to user {status.st_uid}; expected user {os.geteuid()}: name another run directory"
            )
        if stat.S_IMODE(status.st_mode) & 0o777 != 0o700 and status.st_uid == os.geteuid():
            os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & 0o7000 | 0o700)
    finally:
        os.close(descriptor)
