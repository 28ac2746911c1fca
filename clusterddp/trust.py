"""Whether what a run executes can have been written by its user (or root) alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from clusterddp.errors import RunDirectoryError
from clusterddp.rundir import RunDirectory


def check_run(run: RunDirectory) -> None:
    """Raises RunDirectoryError when others may have written what the run executes, or may take its folders' place."""
    for path in (run.path, run.private, run.logs, run.checkpoints, run.job_file, run.batch_script):
        check_own(path)


def check_own(path: Path) -> None:
    """Raises RunDirectoryError unless a file or folder, if it exists, is this user's or root's and theirs to write."""
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
    if status.st_mode & 0o022:
        raise RunDirectoryError(
            f"{path} (user {status.st_uid}, mode {mode}) can be written by others, and a run executes what it says: "
            f"expected that only its owner may. If you know what is in it: chmod -R go-w {path}"
        )
