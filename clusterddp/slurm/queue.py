"""The queue: the jobs of many runs in one call of squeue, and why jobs wait, in plain words."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from clusterddp.errors import SlurmError, SlurmInterrupted
from clusterddp.process import interrupted_by
from clusterddp.slurm import commands as slurm

#: Id (of a task of an array: ARRAY_TASK), state, nodes, start, time limit, partition, reason. The reason is last: it is
#: free text, which may contain the separator. No field of the user's, such as the job's name, is read.
_FIELDS = "%i|%T|%N|%S|%l|%P|%r"
#: How long after Ctrl-C the answer of an sbatch that is under way is awaited, in seconds.
_INTERRUPTED_S = 0.5
#: The maximum number of ids in squeue's arguments. For more, all jobs are listed.
_MOST_IDS = 2000


@dataclass(frozen=True)
class QueuedJob:
    """The controller's record of a job, as squeue prints it."""

    job_id: str
    state: str
    nodes: str
    start: float | None
    """When it started, or when a waiting job is expected to start, in unix seconds. None if unknown."""
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
    """The jobs in lines of squeue, by id. A het job's parts have ids such as ``41+0``, and the first also ``41``."""
    jobs: dict[str, QueuedJob] = {}
    with slurm.understood("squeue", text):
        for line in text.split("\n"):
            if re.match(r"\d+[^|]*\|", line) is None:  # a site's wrapper may print more
                continue
            job_id, state, nodes, start, limit, partition, reason = line.split("|", 6)
            job = QueuedJob(job_id, state, nodes, slurm.unix_time(start), limit, partition, reason)
            jobs[job_id.removesuffix("+0")] = jobs[job_id] = job
    return jobs


def submit(script: Path, *options: str, is_new: Callable[[str], bool] = lambda _: True) -> str:
    """Submits a batch script, and tries for a while longer if Slurm does not answer. Returns the job id.

    A submission whose answer was lost may have been accepted. The queue shows that before sbatch is called again.
    ``is_new``: whether a job of this script that the queue shows may be the submitted one. Raises SlurmUnavailable if
    that stays unknown, or, on a Ctrl-C that the caller has blocked, SlurmInterrupted.
    """
    sent = False

    def ask() -> str:
        nonlocal sent
        if sent and (job := slurm.jobs_by_script(ended=False).get(str(script))) and is_new(job):
            return job
        slurm.require("sbatch")
        sent = True
        return slurm.submit(script, *options, timeout_s=None)  # a timeout could leave an unknown job

    with interrupted_by(SlurmInterrupted("interrupted before Slurm answered"), _INTERRUPTED_S):
        return slurm.patiently(ask)


# --- why a job waits


@dataclass(frozen=True)
class Why:
    """Why a job waits, and what to do, with JOB and RUN for its id and its run. Without a remedy, wait."""

    words: str
    remedy: str = ""


def _changed(what: str) -> str:
    return f"end the job with `scancel JOB`, then run `clusterddp submit --run-dir RUN --change` with {what}"


_RELEASE = "release it with `scontrol release JOB`"
_ADMIN = "ask the cluster's administrators"
_START_NOW = "`scontrol update JobId=JOB StartTime=now`"
_HELD_AFTER_REQUEUE = Why(
    "held by Slurm for a while, which happens after each requeue",
    f"`clusterddp wait --resubmit RUN` lifts the hold, and so does {_START_NOW}",
)

#: By Slurm's reason, in any version. Other reasons are shown unchanged.
_REASONS: dict[str, Why] = {
    "None": Why("the scheduler has not considered the job yet"),
    "SchedDefer": Why("the scheduler has not considered the job yet"),
    "Priority": Why("jobs with a higher priority start first"),
    "Resources": Why("next in the queue, waiting for nodes to become free"),
    "BeginTime": Why("its begin time is in the future", f"to start it now, use {_START_NOW}"),
    "Dependency": Why("waiting for another job to end"),
    "DependencyNeverSatisfied": Why(
        "the job will never start, because it depends on a job that did not end as required",
        "end the job with `scancel JOB`, then continue the run with `clusterddp submit --run-dir RUN`",
    ),
    "JobHeldUser": Why("held by its owner", _RELEASE),
    "JobHeldAdmin": Why("held by an administrator", _ADMIN),
    "JobHoldMaxRequeue": Why("held, because Slurm requeued the job more often than MaxBatchRequeue allows", _RELEASE),
    "JobArrayTaskLimit": Why("its sweep has reached its limit of running members (--max-running)"),
    "Licenses": Why("waiting for a license"),
    "Reservation": Why("waiting for its reservation to begin"),
    "ReservationDeleted": Why("its reservation was deleted", _changed("a different reservation")),
    "PartitionDown": Why("its partition is down", f"{_ADMIN}, or use a different --partition"),
    "PartitionInactive": Why("its partition is inactive", f"{_ADMIN}, or use a different --partition"),
    "PartitionNodeLimit": Why(
        "requests more nodes than its partition allows or than are up",
        _changed("fewer --nodes or a different --partition"),
    ),
    "PartitionTimeLimit": Why(
        "requests more time than its partition allows", _changed("a shorter --time or a different --partition")
    ),
    "BadConstraints": Why(
        "no node has what the job requests", _changed("a different --constraint, --nodelist or --gpus")
    ),
    "InvalidAccount": Why("its account is not valid", _changed("a different --account")),
    "AccountNotAllowed": Why(
        "its account may not use this partition", _changed("a different --account or --partition")
    ),
    "InvalidQOS": Why("its QOS is not valid", _changed("a different --qos")),
    "QOSNotAllowed": Why("its account or partition may not use this QOS", _changed("a different --qos")),
    "Prolog": Why("its nodes are being prepared"),
    "Cleaning": Why("Slurm is still cleaning up after its previous start"),
    "NodeDown": Why("a node that the job requests is down", _changed("other nodes")),
    "FrontEndDown": Why("the front end of the nodes is down", _ADMIN),
}

#: Reasons that come with details, such as names of nodes, by how they begin.
_BEGINNINGS: dict[str, Why] = {
    "ReqNodeNotAvail": Why(
        "nodes that the job needs are down, drained or reserved, often for maintenance",
        "a shorter --time may fit before the maintenance window (see `scontrol show reservation`). `sinfo -R` shows "
        "why nodes are down or drained",
    ),
    "Nodes required for job are DOWN": Why(
        "nodes that the job needs are down, drained or reserved for jobs in higher priority partitions",
        f"`sinfo -R` shows why they are. To start without them, {_changed('fewer --nodes or a different --partition')}",
    ),
    "launch failed requeued held": Why(
        "held, because Slurm could not launch the job on its node and requeued it",
        f"{_RELEASE}. If it happens again, {_ADMIN}",
    ),
    "job requeued in held state": Why("held, because the job was requeued with a hold", _RELEASE),
    "BurstBuffer": Why("waiting for the burst buffer"),
}

#: Limits have dozens of names, such as QOSMaxGRESPerUser or QOSMaxWallDurationPerJobLimit: whose limit it is, which
#: kind, what is limited, and over which jobs.
_LIMIT = re.compile(r"(QOS|Assoc)?(Grp|Max|Min)(\w*?)(PerUser|PerAccount|PerAcct|PerJob|PerNode)?(Limit)?")
_WHOSE = {"QOS": "its QOS", "Assoc": "its account", None: "the cluster"}
#: What is limited, by how Slurm's word for it begins. The first that fits counts.
_WHAT = {
    "gresrunminutes": "GPU minutes of running jobs",
    "gresminutes": "GPU minutes",
    "gres": "GPUs",
    "cpurunminutes": "CPU minutes of running jobs",
    "cpuminutes": "CPU minutes",
    "cpu": "CPUs",
    "memrunminutes": "memory minutes of running jobs",
    "memminutes": "memory minutes",
    "mem": "memory",
    "noderunminutes": "node minutes of running jobs",
    "nodeminutes": "node minutes",
    "node": "nodes",
    "billing": "billing units",
    "submit": "submitted jobs",
    "job": "running jobs",
    "wall": "time",
    "energy": "energy",
    "license": "licenses",
    "bb": "burst buffer",
}
_OVER = {
    "PerUser": "per user",
    "PerAccount": "per account",
    "PerAcct": "per account",
    "PerJob": "per job",
    "PerNode": "per node",
}


def is_hold(job: QueuedJob, begun: bool) -> bool:
    """Whether a waiting job is held: by Slurm after a requeue (``begun``: it has run before), its owner or others."""
    by_reason = job.reason.startswith(("JobHeld", "JobHold")) or "held" in job.reason
    return by_reason or job.state in ("REQUEUE_HOLD", "SPECIAL_EXIT") or (begun and job.reason == "BeginTime")


def why_waiting(job: QueuedJob, begun: bool, run: str = "RUN") -> Why:
    """Why a job waits. ``begun``: it has run before, and its begin time is the end of the hold after a requeue."""
    after_requeue = begun and job.reason == "BeginTime"
    why = _HELD_AFTER_REQUEUE if after_requeue else _explained(job.reason) or Why(job.reason)
    return Why(why.words, why.remedy.replace("JOB", job.job_id).replace("RUN", run))


def _explained(reason: str) -> Why | None:
    return _REASONS.get(reason) or _by_beginning(reason) or _of_limit(reason)


def _by_beginning(reason: str) -> Why | None:
    found = next((why for beginning, why in _BEGINNINGS.items() if reason.startswith(beginning)), None)
    nodes = re.search(r"UnavailableNodes:(\S+)", reason)
    return Why(f"{found.words} ({nodes[1]})", found.remedy) if found and nodes else found


def _of_limit(reason: str) -> Why | None:
    limit = _LIMIT.fullmatch(reason)
    what = next((words for name, words in _WHAT.items() if limit and limit[3].lower().startswith(name)), None)
    if limit is None or what is None:
        return None
    whose, kind, per = _WHOSE[limit[1]], limit[2], limit[4]
    if kind == "Min":
        return Why(f"requests less than {whose} requires: {what} ({reason})", _changed("a larger request"))
    if per in ("PerJob", "PerNode"):
        return Why(f"requests more than {whose} allows: {what} {_OVER[per]} ({reason})", _changed("a smaller request"))
    over = _OVER[per] if per else "in total" if kind == "Grp" else "per user"
    return Why(
        f"a limit of {whose} is reached: {what} {over} ({reason})",
        "the job starts when others that count towards the limit end. A different --qos or --account may have room",
    )
