"""Reads and writes claims: records in a run directory of the job or process that trains the run, or waits to.

A claim's file also names the run that it was written for, so that the claim is void in a copy of the run directory.
``supervisor/lease.py`` decides which claim counts.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterddp import codec
from clusterddp.codec import Count, Misfit, Time
from clusterddp.errors import RunDirectoryError
from clusterddp.process import process_namespace, process_start
from clusterddp.rundir.files import create_exclusively, resolved, write_json
from clusterddp.rundir.files import status as status_of
from clusterddp.rundir.records import read_json
from clusterddp.rundir.run_directory import RunDirectory


@dataclass(frozen=True)
class JobClaim:
    """The claim of a Slurm job.

    ``cluster``: None if the cluster has no name, or the claim is an old one. ``let_go``: the job has released the run.
    A submission's claim also has ``time``, when the job was submitted, and ``attempt``, the first attempt of the job.
    An attempt's claim has ``restarts``: how often Slurm had restarted the job.
    """

    job: str
    cluster: str | None = None
    time: Time | None = None
    attempt: Count | None = None
    restarts: int | None = None
    let_go: bool = False

    def may_be_of(self, cluster: str | None) -> bool:
        """Whether it may be a job of this cluster. A cluster may have no name."""
        return _may_equal(self.cluster, cluster)


@dataclass(frozen=True)
class ProcessClaim:
    """The claim of a local supervisor, or of the loop of a local run.

    ``machine`` and ``process_start``: as in ``process.py``, None in old claims. ``let_go``: the process has released
    the run. ``loop``: whether it is the loop's claim. Set by whoever reads the loop's file, which lacks it.
    """

    host: str
    pid: int
    machine: str | None = None
    process_start: str | None = None
    attempt: Count | None = None
    let_go: bool = False
    loop: bool = False


Claim = JobClaim | ProcessClaim
#: The classes, by the word for them in a claim's file.
_KINDS: Mapping[str, type[Any]] = {"slurm": JobClaim, "local": ProcessClaim}


def is_job_id(value: Any) -> bool:
    """Whether a value is the id of a Slurm job, or of a task of an array."""
    return isinstance(value, str) and re.fullmatch(r"\d+(_\d+)?", value, re.ASCII) is not None


def write_claim(path: Path, run: RunDirectory, claim: Claim) -> None:
    """Writes a claim, for its owner alone."""
    write_json(path, _in_file(run, claim), mode=0o600)


def create_claim(path: Path, run: RunDirectory, claim: Claim) -> bool:
    """Writes a claim, for its owner alone, unless the file exists. Returns whether it did."""
    return create_exclusively(path, json.dumps(_in_file(run, claim)), 0o600)


def change_claim(path: Path, run: RunDirectory, *, let_go: bool, attempt: int | None = None) -> None:
    """Changes a claim in its file, which keeps fields that only another version of clusterddp knows. ``attempt``: None
    leaves it unchanged."""
    begun = {} if attempt is None else {"attempt": attempt}
    write_json(path, {**(read_json(path) or {}), **begun, "let_go": let_go, "run": _identity(run)}, mode=0o600)


def read_claim(path: Path, run: RunDirectory) -> Claim | None:
    """A claim. None if there is none, or it came with a copy of another run's directory.

    RunDirectoryError unless it names a job or a process.
    """
    values = read_json(path)
    if values is None:
        return None
    try:
        claim: Claim = codec.read_one(_KINDS, "kind", values)
        _check(claim)
    except Misfit as error:
        raise RunDirectoryError(f"{path}: {error}. Another program changed the file") from error
    written_for = values.get("run")
    return claim if not isinstance(written_for, dict) or _is_of(run, written_for) else None


def waiting_claim(run: RunDirectory, attempts: Sequence[int]) -> Claim | None:
    """The claim of a submission that has started none of these attempts yet, whose claims are visible. None if there is
    none.

    A node that has looked into a folder of a shared disk may not see new files for a minute. Until it sees the
    attempt's claim, the submission that led to it counts, or the run would seem to be free.
    """
    claim = read_claim(run.submitted_file, run)
    if claim is None or claim.attempt is None:
        return claim
    return claim if claim.attempt > max(attempts, default=-1) else None


def same_holder(claim: Claim, other: Claim) -> bool:
    """Whether two claims name the same job or process. A field that one of them lacks does not count."""
    if isinstance(claim, JobClaim):
        return isinstance(other, JobClaim) and claim.job == other.job and _may_equal(claim.cluster, other.cluster)
    return (
        isinstance(other, ProcessClaim)
        and claim.pid == other.pid
        and _may_equal(claim.process_start, other.process_start)
        and _may_equal(claim.machine, other.machine)
    )


def _may_equal(value: str | None, other: str | None) -> bool:
    return value is None or other is None or value == other


def on_this_machine(claim: ProcessClaim) -> bool:
    """Whether the process that a claim names is visible from here."""
    return claim.host == socket.gethostname() or claim.machine == process_namespace()


def process_alive(claim: ProcessClaim) -> bool:
    """Whether the process that a claim names, which must be on this machine, is running."""
    start = process_start(claim.pid)
    return start is not None and start == claim.process_start


def taken_over(run: RunDirectory, claim: JobClaim) -> bool:
    """Whether the supervisor of a claim's job holds the newest attempt. It may have started before ``submit`` wrote the
    claim of the submission, which then stays."""
    newest = run.newest_attempt()
    holder = None if newest is None else read_claim(run.holder_file(newest), run)
    return isinstance(holder, JobClaim) and holder.job == claim.job


def _check(claim: Claim) -> None:
    """Raises Misfit for an invalid job id or pid, which the types of the fields allow."""
    if isinstance(claim, JobClaim):
        if not is_job_id(claim.job):
            raise Misfit(f"'job' is {claim.job!r}")
    elif not 1 < claim.pid < 2**31:
        raise Misfit(f"'pid' is {claim.pid}")


def _in_file(run: RunDirectory, claim: Claim) -> dict[str, Any]:
    kind = next(word for word, kind in _KINDS.items() if isinstance(claim, kind))
    return {"kind": kind, **codec.written(claim), "run": _identity(run)}


def _identity(run: RunDirectory) -> dict[str, Any]:
    return {"path": resolved(run.path), "inode": status_of(run.path).st_ino}


def _is_of(run: RunDirectory, written_for: Mapping[str, Any]) -> bool:
    """A run that was moved keeps its inode. One that is mounted on a different node may keep only its path."""
    return written_for.get("inode") == status_of(run.path).st_ino or written_for.get("path") == resolved(run.path)
