"""The job definition: what to run, on what, and by which policies, as one frozen dataclass; and as YAML again."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay: those that any of the fields asks for."""

    last: int = 3
    """The newest ones, so many."""
    every: int | None = None
    """Those whose step is a multiple of this."""
    best: str | None = None
    """The one with the best value of this metric. A step that logs a better value than all before is saved at once."""
    best_is: Literal["max", "min"] = "max"
    """Which value is best. In YAML the two are one text: ``best: f1 max``."""

    def order(self, value: float) -> float:
        """A number that is the smaller, the better the value of the metric is; infinity for nan."""
        if value != value:
            return float("inf")
        return -value if self.best_is == "max" else value


@dataclass(frozen=True)
class Checkpointing:
    """When checkpoints are taken, apart from the one at every stop, and which stay."""

    every_steps: int | None = None
    """Steps from one checkpoint to the next; None: the number of steps triggers none."""
    every_s: float | None = 300.0
    """Seconds from one checkpoint to the next; None: time triggers none."""
    auto: bool = False
    """Whether the time from one to the next follows from what a save costs and how often the run is interrupted."""
    keep: Keep = field(default_factory=Keep)


@dataclass(frozen=True)
class Timeouts:
    """How long things may take, in seconds."""

    start_s: float = 1800.0
    """The process group's time-out until the first step is done: imports, data sets, compilation."""
    step_s: float = 1800.0
    """The process group's time-out while training."""
    notice_s: float = 120.0
    """How long before its time limit the run is told to save and stop."""


@dataclass(frozen=True)
class Watchdog:
    """When a run whose steps have ceased is taken to hang, and what happens then. YAML: the fields, or ``off``."""

    step_s: float = 600.0
    """Seconds that a rank whose code stands still may be without coming to a step's end (or another stop point); four
    times the longest that it took so far, where that is more."""
    start_s: float = 1800.0
    """The same until its first step is done: compilation, the first batch."""
    on_hang: Literal["restart", "end"] = "restart"
    """Start all ranks anew on the same nodes, from the newest checkpoint, or end the run as failed."""

    @property
    def beat_s(self) -> float:
        """How often a rank tells the supervisor where it is."""
        return min(2.0, self.step_s / 4)


@dataclass(frozen=True)
class Limits:
    """How much a run may use before it is ended as failed; None: no bound."""

    attempts: int | None = None
    """Starts of all ranks, the first included."""
    gpu_hours: float | None = None
    """Hours times ranks (with device cpu: rank hours), from each attempt's start to its end."""


@dataclass(frozen=True)
class Job:
    """A job definition, complete and checked."""

    name: str
    """YAML key ``job_name``: Slurm's job name, and the run directory's; by default the script's or module's own."""
    script: str | None = None
    """The training script's absolute path; in YAML relative to the YAML's folder."""
    module: str | None = None
    """The training module, as for ``python -m``; exactly one of script and module is given."""
    args: tuple[str, ...] = ()
    """The script's arguments, as written."""
    args_on_resume: tuple[str, ...] = ()
    """Arguments added from the second attempt on, for scripts that resume by themselves."""
    nodes: int = 1
    """How many nodes; the most, where ``min_nodes`` is given. YAML: ``nodes: 2``, or Slurm's ``nodes: 2-4``."""
    min_nodes: int | None = None
    """The fewest nodes that an attempt may have, in YAML a part of ``nodes: 2-4``; None: always ``nodes``."""
    gpus_per_node: int = 1
    """GPUs, and so ranks, on each node; with device cpu the ranks on each node. ``TYPE:G`` in YAML asks for a type."""
    gpus_per_rank: int = 1
    """GPUs that each rank has, for a model laid over several: each node has ``gpus_per_node // gpus_per_rank`` ranks,
    with device cpu too. Every rank sees all of its node's GPUs, as ever; ``ctx.devices`` are its own."""
    gpu_type: str | None = None
    """Slurm's name of the GPU type; in YAML a part of ``gpus_per_node: a100:4``."""
    device: Literal["cuda", "cpu"] = "cuda"
    time_s: int | None = None
    """YAML key ``time``, in Slurm's forms (minutes, M:S, H:M:S, D-H, D-H:M, D-H:M:S): the limit of one job, in seconds;
    None leaves it to the partition."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    exclude: str | None = None
    """Host list of the nodes to avoid."""
    nodelist: str | None = None
    """Host list of the nodes to use."""
    mem: str | None = None
    """Memory per node with its unit, such as 64G; 0 is all of it."""
    cpus_per_task: int | None = None
    """CPUs of each rank."""
    setup: tuple[str, ...] = ()
    """Shell lines run on the first node before the ranks start."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables for the ranks."""
    python: str | None = None
    """The interpreter on the nodes; None is the one that submits."""
    sbatch: dict[str, str | bool] = field(default_factory=dict)
    """Any other long option of sbatch, without dashes; True gives the bare option, False leaves it out."""
    srun: dict[str, str | bool] = field(default_factory=dict)
    """Any other long option of the srun that starts the ranks, as in ``sbatch``: pyxis's ``container-image``, ..."""
    steps: int | None = None
    """The number of steps, for the script to read from its context."""
    seed: int = 0
    global_batch: int | None = None
    """Samples per step over all ranks, whatever their number; the loader's batch_size is then the most that one rank
    takes at a time. None: batch_size times the ranks of the first attempt."""
    checkpoint: Checkpointing = field(default_factory=Checkpointing)
    """YAML: ``{every: 500 steps | 5 minutes | 30 seconds | auto | never, keep: 3}``, or ``every: [500 steps, 5
    minutes]``, and ``keep: {last: 3, every: 5000, best: f1 max}``."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    watchdog: Watchdog | None = field(default_factory=Watchdog)
    """None, in YAML ``off``: a run that hangs does so until its time limit, or the process group's time-out."""
    limits: Limits = field(default_factory=Limits)
    policy: Literal["requeue", "resubmit"] | None = None
    """How a preempted run goes on: requeue keeps the job id and its age, but Slurm holds it for a while; resubmit is a
    new job without that. None: requeue where the cluster allows it, else resubmit."""
    lift_hold: bool = True
    """Whether ``submit --wait`` and ``watch`` may lift the hold after a requeue, as the job's owner may; false in the
    users' defaults where a site does not want that."""
    backend: Literal["nccl", "gloo"] | None = None
    """The process group's backend; None is NCCL for cuda and gloo for cpu."""
    share: Literal["private", "group"] = "private"
    """Who may read the run directory."""

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks on each node."""
        return self.gpus_per_node // self.gpus_per_rank

    @property
    def world_size(self) -> int:
        """The number of ranks; the most, where the number of nodes is a range."""
        return self.nodes * self.ranks_per_node

    @property
    def node_counts(self) -> range:
        """The numbers of nodes that an attempt may have."""
        return range(self.min_nodes or self.nodes, self.nodes + 1)

    @property
    def nodes_text(self) -> str:
        """The number of nodes as sbatch takes it: ``2``, or ``2-4``."""
        return str(self.nodes) if self.min_nodes is None else f"{self.min_nodes}-{self.nodes}"

    @property
    def time_text(self) -> str | None:
        """The time limit as D-HH:MM:SS; None where there is none."""
        if self.time_s is None:
            return None
        minutes, seconds = divmod(self.time_s, 60)
        return f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:{seconds:02}"

    @property
    def shape(self) -> str:
        """The plan in words: ``2 nodes x 8 GPUs per node = 16 ranks``, or ``2 to 4 nodes x ... = 16 to 32 ranks``."""
        if self.device == "cpu":
            per_node, note = _counted(self.ranks_per_node, "process", "processes"), f"{self.backend or 'gloo'} on CPU"
            note += f", each in place of {self.gpus_per_rank} GPUs" if self.gpus_per_rank > 1 else ""
        else:
            kind = f"{self.gpu_type} GPU" if self.gpu_type else "GPU"
            per_node, note = _counted(self.gpus_per_node, kind), self.backend if self.backend == "gloo" else ""
            if self.gpus_per_rank > 1:
                per_node += f" ({self.gpus_per_rank} per rank)"
        nodes, ranks = _counted(self.nodes, "node"), _counted(self.world_size, "rank")
        if self.min_nodes is not None:
            nodes, ranks = f"{self.min_nodes} to {nodes}", f"{self.min_nodes * self.ranks_per_node} to {ranks}"
        return f"{nodes} x {per_node} per node = {ranks}{f' ({note})' if note else ''}"

    def to_yaml(self) -> str:
        """The definition as YAML that ``load_resolved`` reads back as an equal object; built-in defaults included."""
        values = {key: value for key, value in written(self).items() if value not in (None, (), {})}
        return yaml.dump(_plain(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**20)


# --- from a job to text


def written(job: Job) -> dict[str, Any]:
    """A job's values by YAML key, in the order of the fields."""
    values = {item.name: getattr(job, item.name) for item in dataclasses.fields(job)}
    renamed = {"name": "job_name", "time_s": "time"}
    values["time_s"] = job.time_text
    values["nodes"] = job.nodes if job.min_nodes is None else job.nodes_text
    values["gpus_per_node"] = f"{job.gpu_type}:{job.gpus_per_node}" if job.gpu_type else job.gpus_per_node
    values["checkpoint"] = {"every": _every_text(job.checkpoint), "keep": _keep_values(job.checkpoint.keep)}
    values["timeouts"] = dataclasses.asdict(job.timeouts)
    values["watchdog"] = dataclasses.asdict(job.watchdog) if job.watchdog else "off"
    values["limits"] = {name: value for name, value in dataclasses.asdict(job.limits).items() if value is not None}
    return {renamed.get(name, name): value for name, value in values.items() if name not in ("gpu_type", "min_nodes")}


class _Dumper(yaml.SafeDumper):
    """Escapes what is not printable: PyYAML would fold U+0085 into a blank."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"'
    ),
)


def _keep_values(keep: Keep) -> int | dict[str, Any]:
    values = {"last": keep.last, "every": keep.every, "best": keep.best and f"{keep.best} {keep.best_is}"}
    return keep.last if keep == Keep(keep.last) else {key: value for key, value in values.items() if value is not None}


def _every_text(checkpoint: Checkpointing) -> str | tuple[str, ...]:
    if checkpoint.auto:
        return "auto"
    texts = []
    if checkpoint.every_steps is not None:
        texts.append(_counted(checkpoint.every_steps, "step"))
    if checkpoint.every_s is not None:
        texts.append(f"{repr(checkpoint.every_s).removesuffix('.0')} seconds")
    return tuple(texts) if len(texts) == 2 else (texts or ["never"])[0]


def _plain(value: Any) -> Any:
    """With lists for tuples, which YAML does not have."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _counted(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
