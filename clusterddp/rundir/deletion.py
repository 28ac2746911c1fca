"""Deletes old logs of a run. No symbolic link is followed, and no file of another user is deleted."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from clusterddp.reporter import say
from clusterddp.rundir.records import retrying
from clusterddp.rundir.run_directory import RunDirectory


def old_logs(run: RunDirectory, keep: int) -> list[int]:
    """The attempts with logs that are neither the run's first nor among its ``keep`` newest, ascending."""
    attempts = run.attempts()
    old = attempts[1:-keep]
    if not old:
        return []
    present = set(retrying(run.logs, lambda: os.listdir(run.logs)))
    return [number for number in old if run.attempt_logs(number).name in present]


def delete_old_logs(run: RunDirectory, keep: int) -> None:
    """Deletes the logs of ``old_logs``. Errors are reported and do not matter: the next attempt tries again.

    The numbers of attempts remain: the newest attempt keeps its folder, and all have one in ``private``.
    """
    try:
        for number in old_logs(run, keep):
            delete_folder(run.attempt_logs(number))
    except OSError as error:
        say(f"cannot delete old logs in {run.logs}: {error.strerror}")


def delete_folder(folder: Path) -> None:
    """Deletes a folder and all in it. Symbolic links are deleted, not followed; a link in place of the folder stays.

    Raises PermissionError at the first file of another user; what another process deletes at the same time is no error.
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
        raise PermissionError(1, "belongs to another user", name)
    if stat.S_ISDIR(status.st_mode):
        os.rmdir(name, dir_fd=folder)
    else:
        os.unlink(name, dir_fd=folder)


def size_of(folder: Path) -> int:
    """The bytes in a folder's files; links are not followed."""
    return sum(
        os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_size
        for _, _, files, descriptor in os.fwalk(folder)
        for name in files
    )
