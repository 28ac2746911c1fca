"""Whether what a run executes can have been written by its user (or root) alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from clusterddp.errors import RunDirectoryError
from clusterddp.rundir.run_directory import RunDirectory


def check_run(run: RunDirectory) -> None:
    """Raises RunDirectoryError when others may have written what the run executes, or may take its folders' place."""
    check_own(run.path)
    closed = run.path.exists() and run.path.stat().st_mode & 0o077 == 0  # nobody else comes to what is in it
    for path in (run.private, run.logs, run.checkpoints, run.job_file, run.batch_script):
        check_own(path, closed)


def check_own(path: Path, closed: bool = False) -> None:
    """Raises RunDirectoryError unless a file or folder, if it exists, is this user's or root's and theirs to write.

    ``closed``: it lies where nobody else can reach it, whatever its mode.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return
    mode = f"{stat.S_IMODE(status.st_mode):04o}"
    if status.st_uid not in (os.geteuid(), 0):
        raise RunDirectoryError(
            f"{path} belongs to user {status.st_uid} (mode {mode}), and a run executes what it says: expected user "
            f"{os.geteuid()} or root. Begin a run of your own; --fork takes over another's checkpoint"
        )
    if status.st_mode & 0o022 and not closed:
        raise RunDirectoryError(
            f"{path} (user {status.st_uid}, mode {mode}) can be written by others, and a run executes what it says: "
            f"expected that only its owner may. If you know what is in it: chmod -R go-w {path}"
        )
