"""Deletes folders and old logs of a run, without following symbolic links or deleting files of other users."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from clusterddp.reporter import say
from clusterddp.rundir.files import at, names_in
from clusterddp.rundir.records import retrying
from clusterddp.rundir.run_directory import RunDirectory


def old_logs(run: RunDirectory, keep: int) -> list[int]:
    """The attempts with logs that are neither the run's first nor among its ``keep`` newest, ascending."""
    attempts = run.attempts()
    old = attempts[1:-keep]
    if not old:
        return []
    present = set(retrying(run.logs, lambda: names_in(run.logs)))
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
    with at(folder) as (top, above):
        for _, folders, files, descriptor in os.fwalk(top, topdown=False, dir_fd=above):
            for name in (*files, *folders):
                with suppress(FileNotFoundError):
                    _delete(name, descriptor)
        with suppress(FileNotFoundError):
            if not stat.S_ISLNK(os.stat(top, dir_fd=above, follow_symlinks=False).st_mode):
                os.rmdir(top, dir_fd=above)


def delete_entry(path: Path) -> None:
    """Deletes a file, a link, or a folder with all in it."""
    with at(path) as (name, above):
        if stat.S_ISDIR(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
            delete_folder(path)
        else:
            os.unlink(name, dir_fd=above)


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
    with at(folder) as (top, above):
        return sum(
            os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_size
            for _, _, files, descriptor in os.fwalk(top, dir_fd=above)
            for name in files
        )
