"""Who trains a run: the records of its job or process, where its supervisor takes requests, and its job's log.

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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterddp.errors import RunDirectoryError
from clusterddp.process import process_namespace, process_start
from clusterddp.rundir.files import create_exclusively, open_binary, resolved, status, write_json
from clusterddp.rundir.records import Schema, is_count, is_text, optional, read_json, schema_error
from clusterddp.rundir.run_directory import RunDirectory

if TYPE_CHECKING:
    from clusterddp.rundir.run_directory import RunDirectory


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
    return bool(process_start(claim["pid"]) == claim["process_start"])


def _identity(run: RunDirectory) -> dict[str, Any]:
    return {"path": resolved(run.path), "inode": status(run.path).st_ino}


def _is_of(run: RunDirectory, written_for: Mapping[str, Any]) -> bool:
    """A run that was moved keeps its inode. One that is mounted on a different node may keep only its path."""
    return written_for.get("inode") == status(run.path).st_ino or written_for.get("path") == resolved(run.path)


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
_OWN_ENDS = ("COMPLETED", "FAILED", "OUT_OF_MEMORY")


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
    if "time" not in claim or state not in (None, *_OWN_ENDS) or taken_over(run, claim):
        return None
    log = job_log(run, claim["job"])
    lines = _last_lines(log)
    if state is None and not lines:
        return None
    ended = f"job {claim['job']} ended{f' ({state})' if state else ''} before it started the supervisor"
    if lines:
        return EarlyEnd(f"{ended}: {lines[-1]}", lines)
    return EarlyEnd(f"{ended}, and wrote no log. Check that its nodes can access {run}", ())


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
