"""Who owns a run and who trains it: refuses files of other users, and reads the claims of jobs and processes.

Files that a different user may have written are not executed. Old logs of a run are deleted without following symbolic
links or deleting files of other users.

A claim is a record in a run directory that names the job or process which trains the run, or waits to. It also names
the run that it was written for, so that it is void in a copy of the run directory. ``supervisor/lease.py`` decides
which claim counts.

``private/attempt-N/control.json`` has the address where an attempt's supervisor takes requests of the run's owner.

``logs/job-N.log`` is a Slurm job's log: the output of Slurm, the batch script and the supervisor.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clusterddp.errors import RunDirectoryError
from clusterddp.process import process_namespace, process_start
from clusterddp.reporter import say
from clusterddp.rundir.files import at, create_exclusively, exists, hold, names_in, open_binary, resolved, write_json
from clusterddp.rundir.files import status as status_of
from clusterddp.rundir.records import Schema, is_count, is_text, optional, read_json, retrying, schema_error
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
    check_own(run.path)
    closed = exists(run.path) and status_of(run.path).st_mode & 0o077 == 0
    snapshots = [run.code / name for name in names_in(run.code)] if exists(run.code) else []
    for path in (run.private, run.logs, run.checkpoints, run.job_file, run.batch_script, run.code, *snapshots):
        check_own(path, closed)


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


def is_job_id(value: Any) -> bool:
    """Whether a value is the id of a Slurm job, or of a task of an array."""
    return is_text(value) and re.fullmatch(r"\d+(_\d+)?", value, re.ASCII) is not None


_KIND: Schema = {"kind": lambda kind: kind in ("slurm", "local")}
_JOB: Schema = {"job": is_job_id, "cluster": optional(is_text), "attempt": optional(is_count)}
_PROCESS: Schema = {
    "host": is_text,
    "machine": optional(is_text),
    "pid": lambda pid: type(pid) is int and 1 < pid < 2**31,
    "process_start": optional(is_text),
}


def write_claim(path: Path, run: RunDirectory, claim: Mapping[str, Any]) -> None:
    """Writes a claim, for its owner alone."""
    write_json(path, {**claim, "run": _identity(run)}, mode=0o600)


def create_claim(path: Path, run: RunDirectory, claim: Mapping[str, Any]) -> bool:
    """Writes a claim, for its owner alone, unless the file exists. Returns whether it did."""
    return create_exclusively(path, json.dumps({**claim, "run": _identity(run)}), 0o600)


def read_claim(path: Path, run: RunDirectory) -> dict[str, Any] | None:
    """A claim. None if there is none, or it came with a copy of another run's directory.

    RunDirectoryError unless it names a job or a process.
    """
    claim = read_json(path, _KIND)
    if claim is None:
        return None
    if wrong := schema_error(claim, _JOB if claim["kind"] == "slurm" else _PROCESS):
        raise RunDirectoryError(f"{path}: {wrong}. Another program changed the file")
    written_for = claim.pop("run", None)
    return claim if not isinstance(written_for, dict) or _is_of(run, written_for) else None


def waiting_claim(run: RunDirectory, attempts: Sequence[int]) -> dict[str, Any] | None:
    """The claim of a submission that has started none of these attempts yet, whose claims are visible. None if there is
    none.

    A node that has looked into a folder of a shared disk may not see new files for a minute. Until it sees the
    attempt's claim, the submission that led to it counts, or the run would seem to be free.
    """
    claim = read_claim(run.submitted_file, run)
    return None if claim is None or claim.get("attempt", math.inf) <= max(attempts, default=-1) else claim


def on_this_machine(claim: Mapping[str, Any]) -> bool:
    """Whether the process that a claim names is visible from here."""
    return claim["host"] == socket.gethostname() or claim.get("machine") == process_namespace()


def process_alive(claim: Mapping[str, Any]) -> bool:
    """Whether the process that a claim names, which must be on this machine, is running."""
    start = process_start(claim["pid"])
    return start is not None and start == claim.get("process_start")


def _identity(run: RunDirectory) -> dict[str, Any]:
    return {"path": resolved(run.path), "inode": status_of(run.path).st_ino}


def _is_of(run: RunDirectory, written_for: Mapping[str, Any]) -> bool:
    """A run that was moved keeps its inode. One that is mounted on a different node may keep only its path."""
    return written_for.get("inode") == status_of(run.path).st_ino or written_for.get("path") == resolved(run.path)


_ADDRESS: Schema = {
    "host": is_text,
    "port": lambda port: type(port) is int and 0 < port < 65536,
    "token": is_text,
    "job": optional(is_text),
}


@dataclass(frozen=True)
class Address:
    """The name of the supervisor's node, its port, the attempt's token, and the job by Slurm's own number (of a task of
    an array: not the array's)."""

    host: str
    port: int
    token: str
    job: str | None = None


def write_address(run: RunDirectory, attempt: int, address: Address) -> None:
    """Records an attempt's address."""
    write_json(run.control_file(attempt), asdict(address), mode=0o600)


def read_address(run: RunDirectory, attempt: int) -> Address | None:
    """The address of an attempt's supervisor. None if it has recorded none."""
    values = read_json(run.control_file(attempt), _ADDRESS)
    return Address(values["host"], values["port"], values["token"], values.get("job")) if values else None


#: The most bytes and lines that are read at the end of a log.
_BYTES, _LINES = 1 << 14, 10
#: States of jobs that ended by themselves. Others were ended by a scancel, a lost node, a preemption.
OWN_ENDS = ("COMPLETED", "FAILED", "OUT_OF_MEMORY")


def job_log(run: RunDirectory, job_id: str) -> Path:
    """The log of a job."""
    return run.logs / f"job-{job_id}.log"


@dataclass(frozen=True)
class EarlyEnd:
    """The end of a job before its supervisor took the run over: ``reason``, and the last lines of its log."""

    reason: str
    lines: tuple[str, ...]


def early_end(run: RunDirectory, claim: Mapping[str, Any], state: str | None) -> EarlyEnd | None:
    """How a job ended that never started the supervisor. None if it did, or was ended from outside.

    ``claim``: the newest of the run, which is that of a submission until the supervisor has taken it over. ``state``:
    how the job ended, None if Slurm has forgotten it.
    """
    if "time" not in claim or state not in (None, *OWN_ENDS) or taken_over(run, claim):
        return None
    log = job_log(run, claim["job"])
    lines = _last_lines(log)
    if state is None and not lines:
        return None
    ended = f"job {claim['job']} ended{f' ({state})' if state else ''} before it started the supervisor"
    if lines:
        return EarlyEnd(f"{ended}: {lines[-1]}", lines)
    return EarlyEnd(f"{ended}, and wrote no log. Check that its nodes can access {run}", ())


def unrecorded_end(run: RunDirectory, job_id: str, state: str | None) -> EarlyEnd:
    """How a job ended whose supervisor was killed, or could not continue the run, before it recorded why."""
    lines = _last_lines(job_log(run, job_id))
    ended = f"job {job_id} ended{f' ({state})' if state else ''}, and its supervisor did not record why"
    return EarlyEnd(f"{ended}. Its log ends with: {lines[-1]}" if lines else ended, lines)


def taken_over(run: RunDirectory, claim: Mapping[str, Any]) -> bool:
    """Whether the supervisor of a claim's job holds the newest attempt. It may have started before ``submit`` wrote the
    claim of the submission, which then stays."""
    newest = run.newest_attempt()
    holder = None if newest is None else read_claim(run.holder_file(newest), run)
    return holder is not None and holder.get("job") == claim["job"]


def _last_lines(path: Path) -> tuple[str, ...]:
    """The last lines of a log that are not empty. Empty if it cannot be read."""
    try:
        with open_binary(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ()
    return tuple(line.rstrip() for line in text.splitlines() if line.strip())[-_LINES:]
