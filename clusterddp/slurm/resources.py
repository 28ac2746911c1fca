"""Fitting a job to the cluster: checks the request against the partition, and fills in CPUs and memory."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from clusterddp.errors import SlurmMissing, SlurmUnavailable, UsageError
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.program import calls_method, module_file
from clusterddp.jobdef.schema import ONE_GPU_PER_TASK
from clusterddp.jobdef.secrets import MASK, is_secret
from clusterddp.reporter import counted
from clusterddp.slurm import commands as slurm
from clusterddp.slurm.commands import NodeShape
from clusterddp.slurm.preemption_policy import preemption

#: Variables from which sbatch takes options. They are shown at submission, because users may have forgotten them.
_SHOWN = ("SBATCH_", "SLURM_ACCOUNT", "SLURM_CLUSTERS", "SLURM_CONF")


def fit_to_cluster(job: Job, required: bool) -> tuple[Job, list[str]]:
    """The job with CPUs and memory in proportion to its GPUs, and remarks for the user.

    Slurm's default is one CPU per task and little memory. ``required``: whether a missing or unreachable Slurm is an
    error, which it is not for a dry run.
    """
    try:
        slurm.require("sbatch", "srun", "scontrol", "sinfo")
        nodes = slurm.partition_nodes(job.partition)
    except SlurmUnavailable as error:
        if not required:
            return job, [f"could not check partition, GPUs, CPUs and memory: {error}"]
        if isinstance(error, SlurmMissing):
            raise
        raise SlurmUnavailable(f"{error}. To run on this machine without Slurm, add --local") from error
    remarks = _exported()
    check_nodes(job, nodes)
    if job.device == "cuda":
        check_gpus(job, nodes)
        job, share = share_of_node(job, nodes)
        remarks += [*share, *bound_gpus(job)]
    policy = preemption(job.partition, job.qos)
    if job.expedite_requeue and not policy.expedites:
        job = dataclasses.replace(job, expedite_requeue=False)
        remarks.append("expedite_requeue: this cluster does not allow it, so Slurm holds a requeued job as usual")
    return job, [*remarks, policy.sentence(job)]


def bound_gpus(job: Job) -> list[str]:
    """A remark if the job definition binds GPUs to tasks. No command shows the make of the nodes' GPUs."""
    if not (given := [name for name in ONE_GPU_PER_TASK if job.srun.get(name)]):
        return []
    return [
        f"srun.{given[0]}: each rank sees only its own GPUs, as sites with AMD GPUs require. With NVIDIA GPUs, remove "
        "it, because NCCL then has no peer access between the ranks of a node"
    ]


def check_micro(job: Job) -> list[str]:
    """Checks that a job with a range of nodes calls ``run.micro()``, to split a step's samples on fewer nodes.

    Returns remarks for the user if that cannot be checked here.
    """
    if job.min_nodes is None:
        return []
    file = Path(job.script) if job.script else module_file(job.module or "", Path.cwd())
    if file is None:
        return [f"module {job.module} is not in {Path.cwd()}, so clusterddp did not check that it calls run.micro()"]
    if calls_method(file, Path(job.script).parent if job.script else Path.cwd(), "micro"):
        return []
    raise UsageError(
        f"--nodes {job.nodes_text}: {file} never calls run.micro(), and on fewer nodes a rank's share of a step may "
        "not fit into its memory. Put `for micro in run.micro(batch):` around the forward and backward passes, or "
        "request a fixed number of nodes"
    )


def check_nodes(job: Job, nodes: list[NodeShape]) -> None:
    """Checks that the partition has enough nodes. sbatch would accept a job that never starts."""
    if len(nodes) < job.least_allocated:
        raise UsageError(
            f"{_partition(job)} has {counted(len(nodes), 'node')}, fewer than {_asked(job)}. Reduce "
            "--nodes, or choose a different partition with -p"
        )


def _asked(job: Job) -> str:
    spares = f" and --spare-nodes {job.spare_nodes}" if job.spare_nodes else ""
    return f"--nodes {job.nodes_text}{spares}"


def _partition(job: Job) -> str:
    return f"partition {job.partition!r}" if job.partition else "the default partition"


def check_gpus(job: Job, nodes: list[NodeShape]) -> None:
    """Checks that enough nodes have enough GPUs. The error says what is available."""
    fitting = [node for node in nodes if node.gpus_of(job.gpu_type) >= job.gpus_per_node]
    if len(fitting) >= job.least_allocated:
        return
    kind = f"{job.gpu_type} GPUs" if job.gpu_type else "GPUs"
    most = max(node.gpus_of(job.gpu_type) for node in nodes)
    raise UsageError(
        f"{_partition(job)} has {counted(len(fitting), 'node')} with {job.gpus_per_node} {kind} ({len(nodes)} in "
        f"total, at most {most} {kind} per node), but the job requests {job.allocated_text}. --gpus is the number per "
        "node. Request fewer GPUs, or add --device cpu for gloo ranks without GPUs"
    )


def share_of_node(job: Job, nodes: list[NodeShape]) -> tuple[Job, list[str]]:
    """The job with CPUs per task and memory per node in proportion to its GPUs, on the smallest node that fits."""
    fitting = [node for node in nodes if node.gpus_of(job.gpu_type) >= job.gpus_per_node]
    values: dict[str, object] = {}
    if job.cpus_per_task is None:
        values["cpus_per_task"] = max(1, min(node.cpus * job.gpus_per_rank // node.gpus_of(None) for node in fitting))
    if job.mem is None and not any(key.startswith("mem") for key in job.sbatch):
        shares = (node.memory_mib * job.gpus_per_node // node.gpus_of(None) for node in fitting)
        values["mem"] = f"{min(shares)}M"
    if not values:
        return job, []
    fitted: Job = dataclasses.replace(job, **values)  # type: ignore[arg-type]
    share = f"{fitted.cpus_per_task} CPUs per rank and {fitted.mem} of memory per node"
    return fitted, [f"requesting {share}, in proportion to the GPUs"]


def _exported() -> list[str]:
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SHOWN)}
    shown = (f"{name}={MASK if is_secret(name) else value}" for name, value in found.items())
    return [f"sbatch will also apply: {' '.join(shown)}"] if found else []


def as_allocated(job: Job, environ: Mapping[str, str]) -> Job:
    """The job with the resources of the surrounding allocation, which a resubmission requests again."""
    info = slurm.show_job(slurm.own_job_id(environ) or "")
    cpus = environ.get("SLURM_CPUS_PER_TASK")
    return dataclasses.replace(
        job,
        partition=environ.get("SLURM_JOB_PARTITION"),
        account=environ.get("SLURM_JOB_ACCOUNT"),
        qos=environ.get("SLURM_JOB_QOS"),
        cpus_per_task=int(cpus) if cpus else None,
        time_s=int(info.time_limit_s) or None if info else None,
    )
