"""Who holds a run: at most one live job or process trains it, named in ``private/holder.json``."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from clusterddp.launch import slurm
from clusterddp.process import process_start
from clusterddp.rundir import RunDirectory, read_json


def held_by_other(run: RunDirectory, me: Mapping[str, Any] | None = None) -> str | None:
    """Who else holds the run, as ``held by job 41 (RUNNING on n1,n2)``; None when nobody does.

    ``me``: the own entry; a requeued job finds its own. A holder that is dead holds nothing.
    """
    holder = read_json(run.holder_file)
    if holder is None or holder == me:
        return None
    if holder["kind"] == "slurm":
        return _held_by_job(holder["job"])
    return _held_by_process(holder)


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
