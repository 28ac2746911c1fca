"""Who holds a run: at most one live job or process trains it, or waits to.

Two files say who: the submission that has not started an attempt yet (``private/submitted.json``), and the newest
attempt's supervisor (``private/attempt-N/holder.json``). A holder that is dead holds nothing.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clusterddp.launch import slurm
from clusterddp.process import process_start
from clusterddp.records import Form, if_given, is_text, read_json
from clusterddp.rundir import RunDirectory, remove, write_json


def of_job(job_id: str) -> dict[str, Any]:
    """The entry of a Slurm job."""
    return {"kind": "slurm", "job": job_id}


def of_this_process() -> dict[str, Any]:
    """The entry of a local supervisor."""
    pid = os.getpid()
    return {"kind": "local", "host": socket.gethostname(), "pid": pid, "process_start": process_start(pid)}


def submitted(run: RunDirectory, job_id: str) -> None:
    """A job that was just submitted holds the run until it starts an attempt."""
    write_json(run.submitted_file, {**of_job(job_id), "time": time.time()}, mode=0o600)


def local_loop_alive(run: RunDirectory) -> bool:
    """Whether the loop of a local run is there: it holds the run between two attempts, too."""
    loop = _read(run.loop_file)
    return loop is not None and _held_by_process(loop) is not None


def take(run: RunDirectory, attempt: int, me: Mapping[str, Any]) -> dict[str, Any] | None:
    """An attempt's supervisor holds the run from now on; returns the entry of the submission that led to it."""
    write_json(run.holder_file(attempt), me, mode=0o600)
    pending = _read(run.submitted_file)
    if pending is None or _identity(pending) != _identity(me):
        return None
    remove(run.submitted_file)
    return pending


def let_go(run: RunDirectory, attempt: int) -> None:
    """An attempt's job holds the run no longer, though Slurm may not have ended it: no rank of it is left in reach."""
    entry = read_json(run.holder_file(attempt)) or {}
    write_json(run.holder_file(attempt), {**entry, "let_go": True}, mode=0o600)


def holders(run: RunDirectory) -> list[dict[str, Any]]:
    """Who may hold the run, the newest claim first."""
    pending = _read(run.submitted_file)
    # An attempt that is just being claimed has no entry yet: the one before still counts.
    taken = (_read(run.holder_file(number)) for number in reversed(run.attempts()))
    newest = next(filter(None, taken), {})
    return [entry for entry in (pending, newest) if entry and not entry.get("let_go")]


def held_by_other(run: RunDirectory, me: Mapping[str, Any] | None = None) -> str | None:
    """Who else holds the run, as ``held by job 41 (RUNNING on n1,n2)``; None when nobody does.

    ``me``: the own entry; a requeued job finds its own.
    """
    for entry in holders(run):
        if me is not None and _identity(entry) == _identity(me):
            continue
        held = _held_by_job(entry["job"]) if entry["kind"] == "slurm" else _held_by_process(entry)
        if held:
            return held
    return None


def _read(path: Path) -> dict[str, Any] | None:
    """An entry; None when there is none. RunDirectoryError unless it names a job or a process, which may be ended."""
    entry = read_json(path, {"kind": lambda kind: kind in ("slurm", "local")})
    if entry is None:
        return None
    return read_json(path, _JOB if entry["kind"] == "slurm" else _PROCESS)


_JOB: Form = {"job": lambda job: is_text(job) and re.fullmatch(r"\d+(_\d+)?", job, re.ASCII) is not None}
_PROCESS: Form = {
    "host": is_text,
    "pid": lambda pid: type(pid) is int and 1 < pid < 2**31,
    "process_start": if_given(is_text),
}


def _identity(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != "time"}


def _held_by_job(job_id: str) -> str | None:
    job = slurm.show_job(job_id)
    if job is None or not job.live:
        return None
    return f"held by job {job_id} ({job.state}{f' on {job.nodes}' if job.nodes else ''})"


def _held_by_process(holder: Mapping[str, Any]) -> str | None:
    if holder["host"] != socket.gethostname():
        return f"held by process {holder['pid']} on {holder['host']}, which cannot be asked from here"
    alive = process_start(holder["pid"]) == holder["process_start"]
    return f"held by process {holder['pid']} on this machine" if alive else None
