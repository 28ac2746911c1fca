"""``clusterddp requeue``: checkpoints a run after its current step and requeues it."""

from __future__ import annotations

import argparse

from clusterddp.errors import (
    FAILED,
    INTERRUPTED,
    LauncherEnvironmentError,
    RunDirectoryError,
    SlurmError,
    SlurmUnavailable,
    UsageError,
)
from clusterddp.events import sentence
from clusterddp.hostlist import expand
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.load import load_resolved
from clusterddp.reporter import counted, put, show
from clusterddp.rundir.run_directory import ONE_RUN, RunDirectory, open_run
from clusterddp.runs.requests import await_end, request, waiting_job
from clusterddp.slurm import commands as slurm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``requeue``."""
    parser.add_argument("run", metavar="RUN", help=ONE_RUN)
    parser.add_argument(
        "--exclude", metavar="NODES", help="continue in a new job without these nodes, such as n3 or n[3-4], for a day"
    )


def run(arguments: argparse.Namespace, _: object) -> int:
    """Requeues the run, and prints how its attempt ended."""
    run = open_run(arguments.run)
    try:
        nodes = expand(arguments.exclude or "")
    except LauncherEnvironmentError as error:
        raise UsageError(f"--exclude: {error}") from error
    if run.outcome() is None and (job := waiting_job(run)):
        return tell_waiting(run, job, arguments.exclude)
    if nodes and run.outcome() is None:
        check_nodes(run, load_resolved(run.job_file), nodes)
    try:
        attempt, _ = request(run, "requeue", **({"nodes": nodes} if nodes else {}))
        end = await_end(run, attempt)
    except KeyboardInterrupt:
        show(f"No longer waiting. The requeue continues. Check with: clusterddp status {run.quoted}")
        return INTERRUPTED
    put(sentence(end) or "")
    return 0 if end["event"] in ("requeued", "resubmitted", "completed") else FAILED


def tell_waiting(run: RunDirectory, job: slurm.JobInfo, exclude: str | None) -> int:
    """Handles a run that is already in the queue. Slurm chooses its nodes when it starts."""
    if exclude:
        raise RunDirectoryError(
            f"{run} is waiting in the queue (job {job.job_id}, {job.reason}). Exclude nodes with: scontrol update "
            f"JobId={job.job_id} ExcNodeList={exclude}"
        )
    held = f". To release Slurm's hold, use: clusterddp resubmit {run.quoted}" if job.reason == "BeginTime" else ""
    put(f"{run} is already waiting in the queue (job {job.job_id}, {job.reason}){held}")
    return 0


def check_nodes(run: RunDirectory, job: Job, nodes: list[str]) -> None:
    """Refuses, before the run stops, nodes that Slurm would refuse afterwards."""
    if run.loop_file.exists():
        raise UsageError(f"--exclude: {run} is a local run, which has no other nodes")
    for node in nodes:
        try:
            slurm.node_address(node)
        except SlurmUnavailable:
            raise
        except SlurmError as error:
            raise UsageError(f"--exclude: no node {node!r} on this cluster: {error}") from error
    left = set(slurm.usable_nodes(job.partition)) - set(nodes) - set(expand(job.exclude or ""))
    needed = job.least_allocated
    if len(left) < needed:
        remain = counted(len(left), "usable node")
        raise UsageError(
            f"--exclude: without {', '.join(nodes)} the partition has {remain}, but the run needs {needed}"
        )
