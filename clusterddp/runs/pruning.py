"""``clusterddp prune``: deletes old checkpoints, code and logs of runs that are over, after asking."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clusterddp.checkpoint.checkpoint import Checkpoint
from clusterddp.checkpoint.sharded.folder import remove_empty
from clusterddp.checkpoint.store import Checkpoints, incomplete, of_run, with_recorded_best
from clusterddp.errors import CheckpointError, ClusterddpError, RunDirectoryError
from clusterddp.jobdef import code_snapshot
from clusterddp.jobdef.load import load_resolved
from clusterddp.reporter import say, show
from clusterddp.rundir.deletion import delete_folder, old_logs, size_of
from clusterddp.rundir.files import status, unlink
from clusterddp.rundir.ownership import hold_run
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.supervisor.lease import held_by_other


@dataclass(frozen=True)
class Plan:
    """What to delete of a run: files and folders, each with its size in bytes."""

    run: RunDirectory
    files: dict[Path, int]
    logs: dict[Path, int]
    code: dict[Path, int]
    """Snapshots of the code that the newest submission does not use."""
    kept: list[Checkpoint]
    """The checkpoints that stay, newest first."""

    @property
    def size(self) -> int:
        """The number of bytes to free."""
        return sum((*self.files.values(), *self.folders.values()))

    @property
    def folders(self) -> dict[Path, int]:
        """The folders to delete."""
        return {**self.logs, **self.code}


# --- what may be deleted


def plan_for(run: RunDirectory, keep_checkpoints: int, logs: bool) -> Plan:
    """What may be deleted of a run. Raises RunDirectoryError if it is not over, or belongs to another user."""
    check_over(run)
    for folder in (run.checkpoints, run.logs):
        if folder.is_symlink():
            say(f"{folder} is a symbolic link. The files that it points to are not deleted")
    keep = with_recorded_best(load_resolved(run.job_file).checkpoint.keep, of_run(run).candidates())
    checkpoints = Checkpoints(run, run.newest_attempt() or 0, replace(keep, last=keep_checkpoints, every=None))
    old = checkpoints.old()
    paths = [path for checkpoint in (*old, *incomplete(run)) for path in checkpoint.files]
    folders = [run.attempt_logs(number) for number in old_logs(run, keep=1)] if logs else []
    return Plan(
        run,
        {path: status(path).st_size for path in paths if _own(path)},
        {folder: size_of(folder) for folder in folders if _own(folder)},
        {folder: size_of(folder) for folder in code_snapshot.unused(run) if _own(folder)},
        [checkpoint for checkpoint in checkpoints.candidates() if checkpoint not in old],
    )


def check_over(run: RunDirectory) -> None:
    """Raises RunDirectoryError unless the run is over, is not being continued, and belongs to this user."""
    owner, outcome = status(run.path).st_uid, run.outcome()
    if owner != os.geteuid():
        raise RunDirectoryError(f"{run} belongs to user {owner}. Only its owner can prune it")
    if outcome is None:
        raise RunDirectoryError(f"{run} has not ended, so no file was deleted. Wait until it ends, or cancel it")
    if outcome.failed and (held := held_by_other(run)) is not None:
        raise RunDirectoryError(f"{run} failed and is being continued ({held}), so no file was deleted")


def _own(path: Path) -> bool:
    """Whether a file or folder is this user's, and neither a symbolic link nor behind one."""
    return not path.is_symlink() and not path.parent.is_symlink() and path.lstat().st_uid == os.geteuid()


def size_text(count: int) -> str:
    """``831 B``, ``1.2 GiB``."""
    if count < 1024:
        return f"{count} B"
    size, units = count / 1024, ["KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{size:.1f} {units[0]}"


def delete_all(plans: Sequence[Plan]) -> int:
    """Deletes the files. Returns the number of runs with files that could not be deleted."""
    failed, freed = 0, 0
    for plan in plans:
        try:
            _delete(plan)
            freed += plan.size
        except ClusterddpError as error:
            say(str(error))
            failed += 1
        except OSError as error:
            say(f"could not delete {error.filename} of {plan.run}: {error.strerror}")
            failed += 1
    show(f"deleted {size_text(freed)}")
    return failed


def _delete(plan: Plan) -> None:
    """Deletes a run's old files, after checking that the newest checkpoint, which stays, is readable."""
    hold_run(plan.run)
    check_over(plan.run)
    if plan.files and plan.kept:
        try:
            plan.kept[0].verify()
        except CheckpointError as error:
            raise RunDirectoryError(f"{plan.run}: {error}. Its older checkpoints are kept") from error
    for path in plan.files:
        unlink(path)
        if path.parent != plan.run.checkpoints:  # the folder of a sharded model
            remove_empty(path.parent)
    for folder in plan.folders:
        delete_folder(folder)
