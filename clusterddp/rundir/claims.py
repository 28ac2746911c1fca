"""Claims: the records in a run directory that name the job or process which trains the run, or waits to.

A claim names the run that it was written for, so that it is void in a copy of the run directory. Which claim counts:
``supervisor/lease.py``.
"""

from __future__ import annotations

import json
import math
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterddp.errors import RunDirectoryError
from clusterddp.process import process_namespace, process_start
from clusterddp.rundir.files import create_exclusively, resolved, status, write_json
from clusterddp.rundir.records import Schema, is_count, is_text, optional, read_json, schema_error

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
    """Writes a claim, for its owner alone, unless the file exists; returns whether it did."""
    return create_exclusively(path, json.dumps({**claim, "run": _identity(run)}), 0o600)


def read_claim(path: Path, run: RunDirectory) -> dict[str, Any] | None:
    """A claim; None if there is none, or it came with a copy of another run's directory.

    RunDirectoryError unless it names a job or a process.
    """
    claim = read_json(path, _KIND)
    if claim is None:
        return None
    if wrong := schema_error(claim, _JOB if claim["kind"] == "slurm" else _PROCESS):
        raise RunDirectoryError(f"{path}: {wrong}; another program changed it")
    written_for = claim.pop("run", None)
    return claim if not isinstance(written_for, dict) or _is_of(run, written_for) else None


def waiting_claim(run: RunDirectory, attempts: Sequence[int]) -> dict[str, Any] | None:
    """The claim of a submission that has started none of these attempts yet; None if there is none.

    A node that has looked into a folder of a shared disk may not see for a minute what others add to it. Until it sees
    the attempt, the submission that led to it counts: otherwise nobody would seem to hold the run.
    """
    claim = read_claim(run.submitted_file, run)
    return None if claim is None or claim.get("attempt", math.inf) <= max(attempts, default=-1) else claim


def on_this_machine(claim: Mapping[str, Any]) -> bool:
    """Whether the process that a claim names can be seen from here."""
    return claim["host"] == socket.gethostname() or claim.get("machine") == process_namespace()


def process_alive(claim: Mapping[str, Any]) -> bool:
    """Whether the process that a claim names is running; it must be one of this machine."""
    return bool(process_start(claim["pid"]) == claim["process_start"])


def _identity(run: RunDirectory) -> dict[str, Any]:
    return {"path": resolved(run.path), "inode": status(run.path).st_ino}


def _is_of(run: RunDirectory, written_for: Mapping[str, Any]) -> bool:
    """A run that was moved keeps its inode; one that is mounted on another node may keep only its path."""
    return written_for.get("inode") == status(run.path).st_ino or written_for.get("path") == resolved(run.path)
