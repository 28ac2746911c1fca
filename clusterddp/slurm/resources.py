"""What a job requests of a cluster: whether its nodes can give it, and CPUs and memory in proportion to the GPUs.

``fit_to_cluster`` refuses only a job that Slurm would refuse, or never start. Sites have plugins that choose the
partition of a job and change its other options, so that much of what scontrol shows is only a hint.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from clusterddp.errors import SlurmMissing, SlurmUnavailable, UsageError
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.masking import MASK, is_secret
from clusterddp.jobdef.slurm_kinds import ONE_GPU_PER_TASK
from clusterddp.reporter import counted
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm import commands as slurm
from clusterddp.slurm.batch import batch_parameters, script_text
from clusterddp.slurm.commands import Cluster, NodeShape
from clusterddp.slurm.configuration import Preemption, preemption, read_configuration
from clusterddp.slurm.sbatch_variables import overridden

#: Variables from which sbatch takes options. They are shown at submission, because users may have forgotten them.
_SHOWN = ("SBATCH_", "SLURM_ACCOUNT", "SLURM_CLUSTERS", "SLURM_CONF")


def fit_to_cluster(job: Job, required: bool) -> tuple[Job, list[str]]:
    """The job with CPUs and memory in proportion to its GPUs, and remarks for the user. The last is about preemption.

    Slurm's default is one CPU per task and little memory. ``required``: whether a missing or unreachable Slurm is an
    error, which it is not for a dry run. A controller that does not answer is then asked again for a while.
    """
    patience_s = slurm.PATIENCE_S if required else 0.0
    try:
        slurm.require("sbatch", "srun", "scontrol", "sinfo")
        cluster = slurm.patiently(slurm.read_cluster, patience_s)
        reroutes = slurm.patiently(read_configuration, patience_s).reroutes
    except SlurmUnavailable as error:
        if not required:
            return job, [f"could not check partition, GPUs, CPUs and memory: {error}"]
        if isinstance(error, SlurmMissing):
            raise
        raise SlurmUnavailable(f"{error}. To run on this machine without Slurm, add --local") from error
    partition = job.partition or os.environ.get("SBATCH_PARTITION")
    remarks = check_request(job, cluster, partition, certain=not reroutes)
    if partition is None and not reroutes and has_room(job, cluster.of(cluster.default or "")):
        partition = cluster.default
    if job.device == "cuda":
        job, share = share_of_node(job, cluster.of(partition), alike=partition is None)
        remarks += [*share, *bound_gpus(job)]
    reached = partition or ",".join(name for name in cluster.partitions if has_room(job, cluster.of(name)))
    qos = job.qos or os.environ.get("SBATCH_QOS")
    policy = slurm.patiently(partial(preemption, reached or None, qos), patience_s)
    if job.expedite_requeue and not policy.expedites:
        job = dataclasses.replace(job, expedite_requeue=False)
        remarks.append("expedite_requeue: this cluster does not allow it, so Slurm holds a requeued job as usual")
    return job, [*variables_of_sbatch(job), *remarks, *chaining(job, policy), policy.sentence(job)]


def chaining(job: Job, policy: Preemption) -> list[str]:
    """Remarks about the run's next jobs."""
    if not job.continues:
        return ["the run ends with its first job (continue: false). `clusterddp submit --run-dir` continues it"]
    remarks = ["when a job ends, the run continues in the next one. To end it with its first job: --set continue=false"]
    if policy.submit_hosts != "ALL":
        remarks.append(
            f"only {policy.submit_hosts} may submit jobs to {policy.partition}. If its nodes are not among them, "
            "`clusterddp wait --resubmit` on a login node submits the new jobs that the run needs"
        )
    return remarks


def fits(job: Job, node: NodeShape) -> bool:
    """Whether a node has the features and GPUs that a job requests."""
    gpus = job.device == "cpu" or job.gpu_request == "none" or node.gpus_of(job.gpu_type) >= job.gpus_per_node
    return gpus and node.may_satisfy(job.constraint)


def has_room(job: Job, nodes: Sequence[NodeShape]) -> bool:
    """Whether enough of the nodes fit."""
    return sum(fits(job, node) for node in nodes) >= job.least_allocated


def check_request(job: Job, cluster: Cluster, partition: str | None, certain: bool) -> list[str]:
    """Checks that enough nodes have what the job requests. sbatch would accept a job that never starts.

    Without a ``partition``, all nodes count, because a site may choose it. ``certain``: whether no plugin changes jobs
    here. Otherwise, a doubt is a remark. Returns remarks for the user.
    """
    if doubt := _doubt(job, cluster, partition):
        if certain:
            raise UsageError(doubt)
        return [f"{doubt}. Submitting it anyway, because plugins of this site may change jobs"]
    if partition is None and certain and not has_room(job, cluster.of(cluster.default or "")):
        roomy = [name for name in cluster.partitions if has_room(job, cluster.of(name))]
        default = f"{cluster.default}, the default, has too few such nodes" if cluster.default else "none is default"
        advice = f"If sbatch refuses the job, choose one with -p: {', '.join(roomy)}"
        return [f"no partition is given, and {default}. {advice}"]
    return []


def _doubt(job: Job, cluster: Cluster, partition: str | None) -> str | None:
    """Why no job of this shape would start."""
    if missing := [name for name in (partition or "").split(",") if name and name not in cluster.partitions]:
        available = ", ".join(sorted(cluster.partitions)) or "none"
        return f"no partition {missing[0]!r} on this cluster. Available: {available}. Choose one with -p"
    where = f"partition {partition!r}" if partition else "this cluster"
    elsewhere = ", or choose a different partition with -p" if partition else ""
    nodes = cluster.of(partition)
    if len(nodes) < job.least_allocated:
        spares = f" plus --spare-nodes {job.spare_nodes}. Reduce one of them" if job.spare_nodes else ". Reduce --nodes"
        return f"{where} has {counted(len(nodes), 'node')}, fewer than --nodes {job.nodes_text}{spares}{elsewhere}"
    featured = [node for node in nodes if node.may_satisfy(job.constraint)]
    if len(featured) < job.least_allocated:
        return (
            f"{where} has {counted(len(featured), 'node')} with --constraint {job.constraint}, but the job requests "
            f"{job.allocated_text} of them. `sinfo -o '%P %f'` lists the features"
        )
    if has_room(job, featured):
        return None
    if not any(node.gpus for node in cluster.nodes.values()):
        return (
            "Slurm knows no GPUs on this cluster, and sbatch refuses jobs that request some. If its nodes have GPUs, "
            "use --set gpu_request=none. Without GPUs, add --device cpu for gloo ranks"
        )
    kind = f"{job.gpu_type} GPU" if job.gpu_type else "GPU"
    most = max(node.gpus_of(job.gpu_type) for node in featured)
    fitting = sum(fits(job, node) for node in featured)
    return (
        f"{where} has {counted(fitting, 'node')} with at least {counted(job.gpus_per_node, kind)} "
        f"({counted(len(nodes), 'node')} in total, at most {counted(most, kind)} per node), but the job requests "
        f"{job.allocated_text} of them. --gpus is the number per node. Request fewer GPUs, or add --device cpu for "
        "gloo ranks without GPUs"
    )


def share_of_node(job: Job, nodes: Sequence[NodeShape], alike: bool = False) -> tuple[Job, list[str]]:
    """The job with CPUs per task and memory per node in proportion to its GPUs, on the smallest node that fits.

    ``alike``: only what is the same on all of them. Otherwise, Slurm's default applies, and a remark says so.
    """
    nodes = [node for node in nodes if fits(job, node)]
    cpus = {_cpus(job, node) * job.gpus_per_rank // _gpus(job, node) for node in nodes}
    memory = {node.memory_mib and node.memory_mib * job.gpus_per_node // _gpus(job, node) for node in nodes}
    values: dict[str, object] = {}
    shown, unknown = [], []
    exported = {name for name in os.environ if name.startswith(("SBATCH_MEM_PER_", "SBATCH_CPUS_PER_GPU"))}
    if job.cpus_per_task is None and "SBATCH_CPUS_PER_GPU" not in exported:
        if not cpus or (alike and len(cpus) > 1):
            unknown.append("cpus_per_task")
        else:
            values["cpus_per_task"] = share = max(1, min(cpus))
            shown.append(f"{counted(share, 'CPU')} per rank")
    own_memory = job.mem is not None or any(key.startswith("mem") for key in job.sbatch)
    if not own_memory and not exported - {"SBATCH_CPUS_PER_GPU"}:
        sizes = [size for size in memory if size]
        if len(sizes) < len(memory) or not sizes or (alike and len(sizes) > 1):
            unknown.append("mem")
        else:
            values["mem"] = f"{min(sizes)}M"
            shown.append(f"{values['mem']} of memory per node")
    remarks = [f"requesting {' and '.join(shown)}, in proportion to the GPUs"] if shown else []
    if unknown:
        remarks.append(
            f"requesting no {' and no '.join(_WHAT[key] for key in unknown)}, because the nodes that fit differ in it, "
            f"or Slurm does not know it. Slurm's default applies, unless you set {' and '.join(unknown)}"
        )
    return dataclasses.replace(job, **values), remarks  # type: ignore[arg-type]


_WHAT = {"cpus_per_task": "CPUs", "mem": "memory"}


def _gpus(job: Job, node: NodeShape) -> int:
    """The GPUs of a node. Where Slurm knows of none, a job takes all of them."""
    return node.gpus_of(None) or job.gpus_per_node


def _cpus(job: Job, node: NodeShape) -> int:
    """The CPUs of a node that a job gets. With one thread per core, these are its cores."""
    hint = job.sbatch.get("hint") or os.environ.get("SBATCH_HINT")
    threads = job.sbatch.get("threads-per-core") or os.environ.get("SBATCH_THREADS_PER_CORE")
    return node.cpus // node.threads if hint == "nomultithread" or threads == "1" else node.cpus


def bound_gpus(job: Job) -> list[str]:
    """A remark if the job definition binds GPUs to tasks. No command shows the make of the nodes' GPUs.

    With ``gpu-bind: none``, all ranks of a node see its GPUs. With ``gres-flags: allow-task-sharing``, each sees its
    own, but has access to the others'.
    """
    given = [name for name in ONE_GPU_PER_TASK if job.srun.get(name)]
    flags = f"{job.srun.get('gres-flags')},{job.sbatch.get('gres-flags')}"
    if not given or job.srun.get("gpu-bind") == "none" or "allow-task-sharing" in flags:
        return []
    return [
        f"srun.{given[0]}: each rank sees only its own GPUs, as sites with AMD GPUs require. With NVIDIA GPUs, add "
        "srun.gres-flags: allow-task-sharing. Otherwise, NCCL has no peer access between the ranks of a node"
    ]


def variables_of_sbatch(job: Job) -> list[str]:
    """Which variables sbatch takes options from, and which not, because the job definition states these options."""
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SHOWN)}
    if not found:
        return []
    ignored = overridden(found, script_text(batch_parameters(job, RunDirectory("run"), Path.cwd()), ""))

    def shown(words: str, names: Iterable[str]) -> list[str]:
        values = " ".join(f"{name}={MASK if is_secret(name) else _without_secrets(found[name])}" for name in names)
        return [f"{words}: {values}"] if values else []

    return [
        *shown("sbatch will also apply", (name for name in found if name not in ignored)),
        *shown(
            "not applied, because the job has options of its own for it", (name for name in found if name in ignored)
        ),
    ]


def _without_secrets(value: str) -> str:
    """The value, in which SBATCH_EXPORT may set variables: ``ALL,HF_TOKEN=...``."""
    pairs = (part.partition("=") for part in value.split(","))
    return ",".join(
        f"{name}={MASK}" if text and is_secret(name) else f"{name}{sign}{text}" for name, sign, text in pairs
    )
