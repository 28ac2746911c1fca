"""``doctor --nodes``: submits a job that checks nodes as a run's job would use them, and reads its results."""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterddp.checks.node import FAILED, OK, Check, failed, worst
from clusterddp.checks.probe import JOB_FILE, RESULTS_FILE, START_S, TOGETHER_S
from clusterddp.errors import SlurmError
from clusterddp.jobdef.configuration_files import read_configuration_files
from clusterddp.jobdef.configuration_paths import find_configuration_files
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.load import Origins, from_values
from clusterddp.reporter import counted, show
from clusterddp.rundir.files import write_atomically
from clusterddp.rundir.package import write_package
from clusterddp.rundir.records import read_json
from clusterddp.rundir.run_directory import RunDirectory, temporary_beside_runs
from clusterddp.slurm import commands as slurm
from clusterddp.slurm import queue
from clusterddp.slurm.batch import batch_script
from clusterddp.slurm.queue import QueuedJob, queued_jobs, why_waiting
from clusterddp.slurm.resources import fit_to_cluster

#: Timeout in the queue, polling interval, and timeout for the results of a job that has ended, in seconds. On NFS a
#: file may appear a minute late.
QUEUE_S, ASK_S, LATE_S = 3600.0, 0.5, 60.0
#: Timeout for a cancelled job to end, in seconds.
END_S = 10.0
#: The time limit in minutes, longer than START_S and TOGETHER_S.
LIMIT_MIN = 5
#: The keys of a job definition that are options of ``doctor``, too.
KEYS = ("nodes", "gpus_per_node", "device", "partition", "account", "qos")
_LOOK = "see `scontrol show node {}`. Leave the node out with --exclude, and report it to the administrator"


@dataclass(frozen=True)
class Node:
    """A node and its checks, each with its rank."""

    name: str
    checks: tuple[tuple[int, Check], ...]

    @property
    def row(self) -> Check:
        """All checks of the node in one: its problems, or else its results."""
        state = worst(check for _, check in self.checks)
        bad = [(rank, check) for rank, check in self.checks if check.state != OK]
        if state == OK:
            first = {check.name: check.found for _, check in reversed(self.checks)}
            ranks = {rank for rank, _ in self.checks}
            many = f"{len(ranks)} ranks: " if len(ranks) > 1 else ""
            return Check(self.name, state, many + ", ".join(first[name] for name in reversed(first)))
        found = dict.fromkeys(f"{check.name}: {check.found}" for _, check in bad)
        advice = dict.fromkeys(check.advice for _, check in bad if check.advice)
        return Check(self.name, state, ", ".join(found), ". ".join(advice))

    def as_json(self) -> dict[str, Any]:
        """The row and all checks."""
        return {**self.row.as_json(), "checks": [{"rank": rank, **check.as_json()} for rank, check in self.checks]}


def check_nodes(arguments: argparse.Namespace) -> list[Node]:
    """Submits the job, waits for it and returns its nodes. Raises SlurmError if it does not start or has no results."""
    job, remarks = fit_to_cluster(job_of(arguments), required=True)
    for remark in remarks[:-1]:  # the last one is about preemption
        show(remark)
    with temporary_beside_runs(".doctor-") as path:
        folder = RunDirectory(path)
        folder.create()
        write_atomically(folder.path / JOB_FILE, job.to_yaml(), mode=0o600)
        if job.python_of_ranks is not None:
            write_package(folder)
        script = folder.batch_script
        write_atomically(script, batch_script(job, folder, Path.cwd(), module="clusterddp.checks.batch_step"))
        job_id = queue.submit(script, "--no-requeue")
        show(f"doctor: submitted job {job_id} with {job.shape}")
        try:
            return nodes_of(await_results(job_id, folder))
        finally:
            end_job(job_id)


def job_of(arguments: argparse.Namespace) -> Job:
    """The job: by default with all GPUs of the nodes that it may get."""
    job, given = configured(arguments)
    if job.device == "cpu" or "gpus_per_node" in given:
        return job
    cluster = slurm.read_cluster()
    for partition in (job.partition or cluster.default, None):  # the site may choose another one
        nodes = [node for node in cluster.of(partition) if node.may_satisfy(job.constraint)]
        if counts := [count for node in nodes if (count := node.gpus_of(job.gpu_type))]:
            return dataclasses.replace(job, gpus_per_node=min(counts))
    return job


def configured(arguments: argparse.Namespace) -> tuple[Job, Origins]:
    """The job of the options on top of the configuration files, and the places of the given values."""
    defaults = read_configuration_files(
        find_configuration_files(os.environ, Path.cwd()), slurm.named_cluster(os.environ)
    )
    values = {key: getattr(arguments, key) for key in KEYS if getattr(arguments, key) is not None}
    fixed = {"job_name": "clusterddp-doctor", "module": "clusterddp.checks.probe", "gpus_per_rank": 1}
    given: Origins = {}
    values = {**values, **fixed, "time": str(LIMIT_MIN)}
    return from_values(values, defaults=defaults, origins=given, on=arguments.on), given


def await_results(job_id: str, folder: RunDirectory, queue_s: float = QUEUE_S, ask_s: float = ASK_S) -> dict[str, Any]:
    """The job's results, once it is over. Prints why it waits, whenever that changes.

    ``queue_s``: how long it may wait in the queue. ``ask_s``: between two questions to Slurm.
    """
    file, said, ended_at = folder.path / RESULTS_FILE, "", None
    deadline = time.monotonic() + queue_s
    while True:
        found = read_json(file)
        if found and found["over"]:
            return found
        job = slurm.patiently(lambda: find_job(job_id))
        state = job.state if job else "unknown to Slurm"
        if job is None or not job.live:
            ended_at = ended_at or time.monotonic()
            if found:  # cut short
                return found
            if state != "COMPLETED" or time.monotonic() > ended_at + LATE_S:
                raise SlurmError(_no_results(job_id, state, job.nodes if job else "", folder))
        if job and (words := progress_of(job)) not in ("", said):
            show(f"doctor: job {job_id} is {words}")
            said = words
        if job and state == "PENDING" and time.monotonic() > deadline:
            raise SlurmError(
                f"job {job_id} did not start within {queue_s / 60:.0f} minutes ({waiting(job) or 'no reason given'}) "
                "and was cancelled. Try fewer nodes, or a different partition with -p"
            )
        time.sleep(ask_s)


def _no_results(job_id: str, state: str, nodes: str, folder: RunDirectory) -> str:
    try:
        log = (folder.logs / f"job-{job_id}.log").read_text(errors="replace").splitlines()
    except OSError:
        log = []
    said = f". Its log ends with: {' '.join(log[-3:])}" if log else ""
    return (
        f"job {job_id} ended ({state}) {f'on {nodes}' if nodes else 'before it got a node'}. It left no results in "
        f"{folder.path.parent}{said}. The nodes must see that folder, the Python environment and the folder that you "
        "submit from, at the same paths"
    )


def find_job(job_id: str) -> QueuedJob | None:
    """The job as squeue reports it, or None if Slurm does not know it (any more). Raises SlurmError."""
    return queued_jobs([job_id]).get(job_id)


def progress_of(job: QueuedJob) -> str:
    """Why the job is pending, or on which nodes it runs, or '' if Slurm does not report that yet."""
    if job.state == "PENDING":
        return waiting(job)
    return f"running on {job.nodes}" if job.live and job.nodes else ""


def waiting(job: QueuedJob) -> str:
    """Why the job is pending, or '' if Slurm does not report that yet."""
    return f"waiting: {why_waiting(job, begun=False).words}" if job.reason != "None" else ""


def end_job(job_id: str) -> None:
    """Cancels the job unless it has ended, and waits up to END_S seconds until it writes no more files."""
    deadline = time.monotonic() + END_S
    with suppress(SlurmError):
        slurm.cancel(job_id)
        while (job := slurm.patiently(lambda: find_job(job_id))) and job.live and time.monotonic() < deadline:
            time.sleep(ASK_S)


# --- what the job found


def nodes_of(found: Mapping[str, Any]) -> list[Node]:
    """The nodes in the results of the job, with a failed check for each rank that did not finish."""
    nodes: list[Node] = []
    per_node, ranks = found["per_node"], found["ranks"]
    for number, name in enumerate(found["nodes"]):
        own = range(number * per_node, (number + 1) * per_node)
        checks = [(rank, check) for rank in own for check in checks_of(rank, name, ranks[str(rank)])]
        nodes.append(Node(name, (*checks, *shared_gpus(checks))))
    return nodes


def checks_of(rank: int, node: str, known: Mapping[str, Any]) -> list[Check]:
    """A rank's checks, and what it did not finish."""
    checks = [Check.from_json(check) for check in known.get("checks", ())]
    state, why, look = known["state"], known.get("why", ""), _LOOK.format(node)
    because = f" ({why})" if why else ""
    last = f"after the check {checks[-1].name!r}" if checks else ""
    after = last or "before its first check"
    stuck = f"did not continue {last}" if last else "did not finish its first check"
    if state == "missing" and known.get("exited"):
        checks.append(failed("answer", f"rank {rank} exited {after}{because}", look))
    elif state == "missing":
        checks.append(failed("answer", f"rank {rank} did not answer within {START_S:.0f} s{because}", look))
    elif state == "starting":
        checks.append(failed("answer", f"rank {rank} {stuck} within {START_S:.0f} s{because}", look))
    elif state == "gone":
        checks.append(failed("answer", f"rank {rank} exited {after}{because}", look))
    elif state == "ready":
        checks.append(failed("answer", f"rank {rank} {stuck} within {TOGETHER_S:.0f} s{because}", look))
    return checks


def shared_gpus(checks: Sequence[tuple[int, Check]]) -> list[tuple[int, Check]]:
    """A failed check for each rank of a node whose GPU is that of an earlier rank, because NCCL needs one per rank."""
    holders: dict[str, int] = {}
    found = []
    for rank, check in checks:
        uuid = check.values.get("uuid")
        if uuid is not None and (first := holders.setdefault(uuid, rank)) != rank:
            advice = "request one GPU per rank with --gpus. A --gpu-bind must not give two ranks the same one"
            found.append((rank, failed("device", f"ranks {first} and {rank} share the GPU {uuid[:8]}", advice)))
    return found


def summary(nodes: Sequence[Node]) -> str:
    """How many nodes passed."""
    good = sum(node.row.state != FAILED for node in nodes)
    return f"{good} of {counted(len(nodes), 'node')} passed"
