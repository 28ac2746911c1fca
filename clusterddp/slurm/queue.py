"""squeue: the jobs of many runs in one call, and when waiting ones are expected to start."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from clusterddp.errors import SlurmError
from clusterddp.slurm import commands as slurm

#: Id (of a task of an array: ARRAY_TASK), state, nodes, start, time limit, partition, reason. The reason is last: it is
#: free text, which may contain the separator. No field of the user's, such as the job's name, is read.
_FIELDS = "%i|%T|%N|%S|%l|%P|%r"
#: The most ids in squeue's arguments; beyond that, all jobs are listed.
_MOST_IDS = 2000


@dataclass(frozen=True)
class QueuedJob:
    """The controller's record of a job, as squeue prints it."""

    job_id: str
    state: str
    nodes: str
    start: float | None
    """When it started or, of a waiting job, is expected to start, in unix seconds; None if unknown."""
    time_limit: str
    partition: str
    reason: str

    @property
    def live(self) -> bool:
        """Whether the job runs or may yet run."""
        return self.state in slurm.LIVE_STATES


def queued_jobs(ids: Collection[str], timeout_s: float = slurm.TIMEOUT_S) -> dict[str, QueuedJob]:
    """The jobs with these ids that the controller knows, also those that ended minutes ago. One call of squeue."""
    chosen = ["-j", ",".join(sorted(ids))] if len(ids) <= _MOST_IDS else []
    try:
        every = ("--all", "--noheader", "--array", "--states=all")
        text = slurm.run("squeue", *every, *chosen, "-o", _FIELDS, timeout_s=timeout_s)
    except SlurmError as error:
        if "Invalid job id" in str(error):  # a single id, which the controller does not know, is an error
            return {}
        raise
    return {job_id: job for job_id, job in parse_queue(text).items() if job_id in ids}


def parse_queue(text: str) -> dict[str, QueuedJob]:
    """The jobs in lines of squeue, by id; the components of a het job by ``41+0``, its first one also by ``41``."""
    jobs: dict[str, QueuedJob] = {}
    with slurm.understood("squeue", text):
        for line in text.split("\n"):
            if re.match(r"\d+[^|]*\|", line) is None:  # a site's wrapper may print more
                continue
            job_id, state, nodes, start, limit, partition, reason = line.split("|", 6)
            job = QueuedJob(job_id, state, nodes, slurm.unix_time(start), limit, partition, reason)
            jobs[job_id.removesuffix("+0")] = jobs[job_id] = job
    return jobs
