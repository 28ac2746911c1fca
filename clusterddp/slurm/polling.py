"""When commands that wait for runs ask the controller: soon after a change, and rarely while a run trains or waits.

What usually changes, a run's own files show: an attempt starts or ends, or falls silent. So these are looked at often,
and slurmctld, which serves everyone, is asked seldom. Sites ask for at most about one query a minute and user.

The commands of a user that watch runs on one machine share squeue's answers: one of them asks for all. The answer is
in a small file of the user's, in $XDG_RUNTIME_DIR or the folder for temporary files. Without a usable file, each
command asks.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import stat
import tempfile
import time
from collections.abc import Collection, Hashable, Mapping
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import NamedTuple

from clusterddp.errors import SlurmError
from clusterddp.history.beginnings import Started
from clusterddp.history.codec import decode
from clusterddp.history.ends import AttemptEnd
from clusterddp.rundir.files import status, write_atomically
from clusterddp.rundir.json_lines import read_backwards
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.schemas import EVENT
from clusterddp.slurm import commands as slurm
from clusterddp.slurm.queue import QueuedJob, queued_jobs

#: Seconds after which an answer counts no more, and a job that no command has wanted since is not asked about.
KEPT_S = 600.0


class _Answer(NamedTuple):
    """What squeue answered at a time, in unix seconds, about the jobs that commands want: when each was last wanted."""

    at: float
    wanted: Mapping[str, float]
    jobs: Mapping[str, QueuedJob]


def shared_jobs(ids: Collection[str], since: float, timeout_s: float) -> tuple[Mapping[str, QueuedJob], float]:
    """The jobs with these ids, as in ``queued_jobs``, and when Slurm was asked. Asks only if no command has since then,
    and also about the jobs that other commands want.

    Both times are on the monotonic clock.
    """
    file, now, wall = _file(), time.monotonic(), time.time()
    answer = _read(file) if file else None
    if answer is None or not 0.0 <= wall - answer.at < KEPT_S:
        answer = _Answer(-math.inf, {}, {})
    wanted = {job_id: at for job_id, at in answer.wanted.items() if wall - at < KEPT_S} | dict.fromkeys(ids, wall)
    if now - (wall - answer.at) > since and answer.wanted.keys() >= set(ids):
        answer = answer._replace(wanted=wanted)
    else:
        answer = _Answer(wall, wanted, queued_jobs(wanted, timeout_s))
    if file:
        jobs = {job_id: astuple(job) for job_id, job in answer.jobs.items()}
        with suppress(OSError):
            write_atomically(file, json.dumps([answer.at, wanted, jobs]), mode=0o600)
    return {job_id: job for job_id, job in answer.jobs.items() if job_id in ids}, now - (wall - answer.at)


def _file() -> Path | None:
    """The file of this user and cluster. None if the cluster is unknown, because ids belong to one."""
    name = re.sub(r"[^\w.-]", "_", slurm.cluster_name(os.environ) or "")
    folder = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(folder, f"clusterddp-squeue-{os.geteuid()}-{name}.json") if name else None


def _read(file: Path) -> _Answer | None:
    """The answer in the file, unless another user could have written it."""
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            status = os.fstat(opened.fileno())
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o600:
                return None
            at, wanted, jobs = json.loads(opened.read())
        times = {job_id: float(when) for job_id, when in wanted.items()}
        return _Answer(float(at), times, {job_id: QueuedJob(*job) for job_id, job in jobs.items()})
    except (OSError, ValueError, TypeError, AttributeError):
        return None


#: The pause after a change, in seconds. Each further pause is twice as long, and random by a quarter, so that the
#: questions of many commands spread out.
SOON_S = 1.0
#: The longest pause while nothing changes, while a training run writes nothing, and while something must happen soon.
QUIET_S, SILENT_S, IMMINENT_S = 300.0, 30.0, 5.0
#: A run is silent if it has written nothing for this long, and for three times its longest pause so far.
SILENT_AFTER_S = 60.0


class Pace:
    """When the next question is due."""

    def __init__(self) -> None:
        self._seen: Hashable = None
        self._asked_at = self._at = self._since = -float("inf")
        self._answered_at: float | None = None
        self._pause_s = SOON_S

    def due(self, seen: Hashable) -> bool:
        """Whether to ask now. ``seen``: all that is known without a question. A change makes the next one soon."""
        if seen != self._seen:
            self._seen, self._pause_s, self._since = seen, SOON_S, time.monotonic()
            self._at = min(self._at, self._asked_at + SOON_S)
        return time.monotonic() >= self._at

    def jobs(self, _seen: Hashable, ids: Collection[str], timeout_s: float) -> Mapping[str, QueuedJob]:
        """The jobs with these ids, as in ``queued_jobs``: the answer to another command, if it has asked since the last
        question and the last change."""
        jobs, self._answered_at = shared_jobs(ids, self._since, timeout_s)
        return jobs

    def asked(self, most_s: float = QUIET_S) -> None:
        """The controller has been asked. ``most_s``: the longest pause until the next question."""
        self._asked_at = self._since = time.monotonic() if self._answered_at is None else self._answered_at
        self._answered_at = None
        self._at = self._asked_at + min(self._pause_s, most_s) * random.uniform(1.0, 1.25)
        self._pause_s = min(2 * self._pause_s, QUIET_S)


class Activity:
    """What a run's files show of its attempts."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._sizes: tuple[int, ...] = ()
        self._newest: tuple[int, str] | None = None
        self._changed_at = time.monotonic()
        self._longest_s = 0.0

    def seen(self) -> Hashable:
        """The newest start or end of an attempt, and whether the attempt is silent. Changes with nothing else."""
        files = (self._run.events_file, self._run.metrics_file, self._run.timing_file)
        sizes, now = tuple(map(_size, files)), time.monotonic()
        if sizes != self._sizes:
            if sizes[:1] != self._sizes[:1]:
                with suppress(OSError):
                    self._newest = self._boundary()
            if self._sizes and not self.silent:
                self._longest_s = max(self._longest_s, now - self._changed_at)
            self._sizes, self._changed_at = sizes, now
        return self._newest, self.silent

    @property
    def silent(self) -> bool:
        """Whether an attempt has started, and has written nothing for unusually long."""
        trains = self._newest is not None and self._newest[1] == Started.name
        return trains and time.monotonic() - self._changed_at > max(SILENT_AFTER_S, 3 * self._longest_s)

    def _boundary(self) -> tuple[int, str] | None:
        for event in map(decode, read_backwards(self._run.events_file, EVENT)):
            if isinstance(event, (Started, AttemptEnd)):
                return event.attempt, event.name
        return None


def _size(file: Path) -> int:
    try:
        return int(status(file).st_size)
    except OSError:
        return -1


class PacedQueue:
    """The answers of squeue for a view that is refreshed: the last one, until the next question is due."""

    def __init__(self) -> None:
        self._pace = Pace()
        self._jobs: Mapping[str, QueuedJob] = {}
        self._error: SlurmError | None = None

    def jobs(self, seen: Hashable, ids: Collection[str], timeout_s: float) -> Mapping[str, QueuedJob]:
        """The jobs with these ids, as in ``queued_jobs``. SlurmError if the last question had no answer."""
        if self._pace.due((seen, frozenset(ids))):
            try:
                self._jobs, self._error = self._pace.jobs(seen, ids, timeout_s), None
            except SlurmError as error:
                self._error = error
            self._pace.asked(QUIET_S if self._error is None else SILENT_S)
        if self._error is not None:
            raise self._error
        return self._jobs
