"""Reads and writes claims: records in a run directory of the job or process that trains the run, or waits to.

A claim also names the run that it was written for, so that it is void in a copy of the run directory.
``supervisor/lease.py`` decides which claim counts.
"""

from __future__ import annotations

import json
import math
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterddp.errors import RunDirectoryError
from clusterddp.process import process_namespace, process_start
from clusterddp.rundir.files import create_exclusively, resolved, write_json
from clusterddp.rundir.files import status as status_of
from clusterddp.rundir.records import read_json
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.schemas import Schema, is_count, is_text, optional, schema_error


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


def taken_over(run: RunDirectory, claim: Mapping[str, Any]) -> bool:
    """Whether the supervisor of a claim's job holds the newest attempt. It may have started before ``submit`` wrote the
    claim of the submission, which then stays."""
    newest = run.newest_attempt()
    holder = None if newest is None else read_claim(run.holder_file(newest), run)
    return holder is not None and holder.get("job") == claim["job"]
