"""squeue's answers, shared by the commands of a user that watch runs on this machine: one of them asks for all.

They are in a small file of the user's, in $XDG_RUNTIME_DIR or the folder for temporary files. Without a usable file,
each command asks.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import NamedTuple

from clusterddp.rundir.files import write_atomically
from clusterddp.slurm import commands as slurm
from clusterddp.slurm.queue import QueuedJob, queued_jobs

#: Seconds after which an answer is deleted. Commands accept none that is older.
KEPT_S = 600.0


class _Answer(NamedTuple):
    """What squeue answered at a time, in unix seconds, about these ids."""

    at: float
    ids: frozenset[str]
    jobs: Mapping[str, QueuedJob]


def shared_jobs(ids: Collection[str], since: float, timeout_s: float) -> tuple[Mapping[str, QueuedJob], float]:
    """The jobs with these ids, as in ``queued_jobs``, and when Slurm was asked. Asks only if no command has since then.

    Both times are on the monotonic clock.
    """
    file, now, wall = _file(), time.monotonic(), time.time()
    known = [answer for answer in _read(file) if 0.0 <= wall - answer.at < KEPT_S] if file else []
    for answer in known:
        if now - (wall - answer.at) > since and answer.ids.issuperset(ids):
            jobs = {job_id: job for job_id, job in answer.jobs.items() if job_id in ids}
            return jobs, now - (wall - answer.at)
    new = _Answer(wall, frozenset(ids), queued_jobs(ids, timeout_s))
    if file:
        kept = [new, *(answer for answer in known if not answer.ids <= new.ids)]
        values = [(at, sorted(ids), {key: astuple(job) for key, job in jobs.items()}) for at, ids, jobs in kept]
        with suppress(OSError):
            write_atomically(file, json.dumps(values), mode=0o600)
    return new.jobs, now


def _file() -> Path | None:
    """The file of this user and cluster; None if the cluster is unknown, because ids belong to one."""
    name = re.sub(r"[^\w.-]", "_", slurm.cluster_name(os.environ) or "")
    folder = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(folder, f"clusterddp-squeue-{os.geteuid()}-{name}.json") if name else None


def _read(file: Path) -> list[_Answer]:
    """The answers in the file, unless another user could have written it."""
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            status = os.fstat(opened.fileno())
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o600:
                return []
            values = json.loads(opened.read())
        return [
            _Answer(float(at), frozenset(ids), {key: QueuedJob(*job) for key, job in jobs.items()})
            for at, ids, jobs in values
        ]
    except (OSError, ValueError, TypeError, AttributeError):
        return []
