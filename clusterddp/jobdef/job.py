"""The job definition: what to run, on which resources and by which policies, as a frozen dataclass and as YAML.

Each field of ``Job`` is a key. Its type, its default and the string below it are what the reader, the writer, the JSON
Schema, the options of ``submit`` and the reference page need to know. ``Annotated`` adds the rest (``keys/table.py``,
``kinds.py``, ``slurm_kinds.py``). To add a key, add a field and use it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import yaml

from clusterddp.jobdef import kinds
from clusterddp.jobdef.kinds import Frozen, NotIn, Placeholders, Sbatch
from clusterddp.jobdef.program import with_overrides
from clusterddp.jobdef.slurm_kinds import GPUS, MEMORY, NODES, ONE_GPU_PER_TASK, TIME, slurm_options, time_text
from clusterddp.keys import table
from clusterddp.keys.kinds import REGEX, WORD, positive, whole
from clusterddp.keys.node import Mistake, Node
from clusterddp.keys.table import Entry, Named, NoKey, Option, OrOff, Parts, Section, Short, Text, entries
from clusterddp.reporter import counted
from clusterddp.trackers.registry import TRACKERS

Seconds = Annotated[float, positive("seconds")]
Hours = Annotated[float, positive("hours")]
#: Text that is one word in the batch script.
Word = Annotated[str, WORD]

#: The module that calls a function which ``clusterddp.launch()`` pickled.
FUNCTION = "clusterddp.function"
#: The options of pyxis that name an image or a container. CSCS's container engine has ``environment``, Slurm's own
#: support of OCI bundles ``container``.
PYXIS = ("container-image", "container-name")


@dataclass(frozen=True)
class Keep:
    """Which checkpoints are kept. A checkpoint is kept if it matches any of the fields."""

    last: int = 3
    """The number of newest checkpoints."""
    every: int | None = None
    """Checkpoints whose step is a multiple of this. None: no such rule."""
    best: Annotated[str | None, kinds.BEST, Parts("best_is")] = None
    """The metric whose best checkpoint is kept. None: no such rule. A new best value is saved at once. After an
    evaluation under ``run.every()`` this is the evaluated state, otherwise the state after the step."""
    best_is: Literal["max", "min"] = "max"
    """Whether the largest or the smallest value is best. In YAML, ``best: f1 max`` gives both."""

    @property
    def best_rule(self) -> str | None:
        """The rule as in YAML, such as ``f1 max``, or None."""
        return self.best and f"{self.best} {self.best_is}"

    def order(self, value: float) -> float:
        """A sort key for values of the metric: the best value has the smallest key, NaN has infinity."""
        if value != value:
            return float("inf")
        return -value if self.best_is == "max" else value


_EVERY = (
    "`500 steps`, `5 minutes`, both as a list, `auto` (from the cost of a save and the time between interruptions), or "
    "`never`. A checkpoint is also saved at every stop."
)


@dataclass(frozen=True)
class Checkpointing:
    """When checkpoints are saved, in addition to the one at every stop, and which are kept."""

    every_steps: Annotated[int | None, Named("every"), kinds.INTERVAL, Parts("every_s", "auto"), Text(_EVERY)] = None
    """Steps between checkpoints. None: no such rule."""
    every_s: float | None = 300.0
    """Seconds between checkpoints. None: no such rule."""
    auto: bool = False
    """Whether the interval is computed from the cost of a save and the time between interruptions."""
    keep: Annotated[
        Keep,
        Short(Keep, "last", "a whole number of at least 1, or {last: 3, every: 5000, best: f1 max}"),
        Text("The number of newest checkpoints that are kept, or rules: `{last: 3, every: 5000, best: f1 max}`."),
    ] = field(default_factory=Keep)
    """Which checkpoints are kept."""


@dataclass(frozen=True)
class Timeouts:
    """Timeouts of the process group and of the nodes' setup, and the notice before the time limit, in seconds."""

    start_s: Seconds = 1800.0
    """The process group's timeout until the first step is complete: imports, data sets, compilation."""
    step_s: Seconds = 1800.0
    """The process group's timeout after the first step."""
    connect_s: Seconds = 300.0
    """Seconds that the ranks may take to connect to each other once all of them have called ``clusterddp.init()``."""
    nodes_s: Seconds = 600.0
    """Seconds that ``node_setup`` and ``stage`` may take on the nodes of a job before the ranks start."""
    notice_s: Seconds = 120.0
    """Seconds before the time limit at which the run saves and stops."""


#: Seconds that the other ranks wait for one in a debugger.
DEBUGGED_S = 86400.0
#: Heartbeats per second, of all ranks together.
MOST_BEATS = 1024


@dataclass(frozen=True)
class Watchdog:
    """When a run without progress counts as hung, and what happens then. In YAML, ``off`` disables it."""

    step_s: Seconds = 600.0
    """Seconds that an idle rank may take to reach the end of a step or another stop point. The timeout is at
    least four times the longest time that it has taken so far."""
    start_s: Seconds = 1800.0
    """The same until the first step is complete: compilation, the first batch."""
    on_hang: Literal["restart", "end"] = "restart"
    """Restart all ranks in place from the newest checkpoint, or end the run as failed."""

    @property
    def beat_s(self) -> float:
        """The interval of the ranks' heartbeats, in seconds, unless there are very many ranks."""
        return min(2.0, self.step_s / 4)

    def period_s(self, ranks: int) -> float:
        """The same for this number of ranks. The supervisor gets at most MOST_BEATS heartbeats per second."""
        return max(self.beat_s, ranks / MOST_BEATS)


@dataclass(frozen=True)
class Resume:
    """How a script that saves and loads its own checkpoints continues from the newest complete one."""

    checkpoint: Annotated[tuple[str, ...], kinds.PATTERNS, Placeholders(only=("run_dir",))] = ()
    """The checkpoint's file or folder as a pattern such as ``{run_dir}/out/checkpoint-*.pth``, or a list of patterns. A
    relative one is relative to the folder that the job was submitted in. Files from before the run do not match."""
    args: Annotated[tuple[str, ...], Placeholders()] = ()
    """Arguments that are added once there is a checkpoint: ``[--resume, "{checkpoint}"]``."""
    replace: Annotated[tuple[str, ...] | None, Placeholders()] = None
    """Arguments in place of those under the key ``args`` once there is a checkpoint. None: those."""


@dataclass(frozen=True)
class Limits:
    """How much a run may use before it ends as failed. None: no limit."""

    attempts: int | None = None
    """The number of attempts, including the first."""
    gpu_hours: Hours | None = None
    """Hours of all attempts times the GPUs of their nodes, including spare nodes. With device cpu, rank hours. The run
    saves and ends as soon as they are used up."""


@dataclass(frozen=True)
class Done:
    """How to recognize that a script has finished its training. Exactly one of the fields is given."""

    file: str | None = None
    """A file that exists at the end, or a pattern of files. YAML: ``done: out/epoch_90.pt``."""
    log: Annotated[str | None, REGEX] = None
    """A regular expression that a line of output matches at the end. YAML: ``done: {log: epochs completed}``."""

    @property
    def words(self) -> str:
        """The mark in words."""
        return self.file or f"log: {self.log}"


@dataclass(frozen=True)
class StopSignal:
    """How clusterddp stops the ranks of a script that does not use it."""

    signal: Literal["TERM", "INT", "USR1", "USR2"] | None = None
    """The signal that each rank gets at every notice, once and instead of TERM. None: Slurm's own signals, which are
    TERM at a preemption and none before the time limit."""


def _keys() -> Mapping[str, Entry]:
    return KEYS


@dataclass(frozen=True)
class Job:
    """A complete and checked job definition. ``load()`` and ``from_values()`` in ``clusterddp.jobdef.load`` make one.

    The keys in YAML are the names of the fields, except ``job_name`` and ``time``. Fields that end in ``_s`` are in
    seconds. Example: ``from_values({"script": "train.py", "nodes": 2, "gpus_per_node": 8, "time": "8:00:00"})``.
    """

    name: Annotated[
        str,
        Named("job_name"),
        kinds.NAME,
        kinds.ONE_JOB,
        Option("-J, --job-name NAME", "name of the job, and of a new run directory"),
    ]
    """The name of the Slurm job and of the run directory. Default: that of the script or module."""
    script: Annotated[str | None, kinds.ONE_JOB] = None
    """The training script's absolute path. In YAML, a relative path is relative to the YAML file."""
    module: Annotated[str | None, kinds.MODULE, kinds.ONE_JOB] = None
    """The training module, as for ``python -m``. Exactly one of ``script`` and ``module`` is given."""
    hydra: bool | None = None
    """Whether the program is a Hydra app: sweeps write overrides, and all attempts and ranks have one output folder.
    None: detect it in the source (a function decorated with ``@hydra.main``)."""
    args: Annotated[tuple[str, ...], Placeholders(), kinds.ONE_SCRIPT] = ()
    """The script's arguments, as text. Each attempt replaces ``{run_dir}``, ``{attempt}``, ``{node_rank}``,
    ``{local_rank}``, ``{nodes}``, ``{master_addr}``, ``{master_port}``, ``{checkpoint}`` and ``{checkpoint_number}``.
    ``{{run_dir}}`` is the literal text."""
    resume: Annotated[
        Resume | None,
        kinds.OfScript(Resume),
        kinds.ONE_SCRIPT,
        Option(
            "--preset NAME",
            "name of the script's repository, to continue from the script's own checkpoints. See `clusterddp config "
            "presets`",
        ),
    ] = None
    """How a script continues from its own checkpoints: ``{checkpoint: "{run_dir}/out/*.pth", args: [--resume,
    "{checkpoint}"]}``, or the name of a preset, whose other keys apply, too. ``preset:`` combines one with keys of
    your own. None: the script needs no arguments, or uses ``ctx.run()``."""
    done: Annotated[Done | None, kinds.FileOrLog(Done), Placeholders(only=("run_dir",)), kinds.ONE_SCRIPT] = None
    """A file pattern, or ``{log: REGEX}``, that marks the end of the run. The run completes once there is such a file
    or line of output, and not by exit code 0 alone. ``{run_dir}`` in it is the run directory. None: exit
    code 0 completes the run."""
    stop: Annotated[StopSignal, Section(StopSignal, "a mapping such as {signal: USR1}")] = field(
        default_factory=StopSignal
    )
    """How clusterddp stops the ranks of a script that does not use it: ``{signal: USR1}``."""
    nodes: Annotated[
        int, NODES, Parts("min_nodes"), Option("-N, --nodes N", "number of nodes, or a range such as 2-4 (default: 1)")
    ] = 1
    """The number of nodes, or a range such as ``2-4``, of which this is the maximum."""
    min_nodes: int | None = None
    """The minimum number of nodes, in YAML the first number of ``nodes: 2-4``. None: exactly ``nodes``."""
    spare_nodes: Annotated[
        int, whole(0), Option("--spare-nodes N", "additional nodes that take over when another node fails (default: 0)")
    ] = 0
    """Additional nodes of the job. They stay idle until one of the others fails, and then take over its ranks."""
    gpus_per_node: Annotated[
        int,
        GPUS,
        Parts("gpu_type"),
        Option(
            "--gpus, --gpus-per-node G",
            "GPUs per node (for sbatch, --gpus is the total), each with one rank, or TYPE:G. With --device cpu, ranks "
            "per node (default: 1)",
        ),
    ] = 1
    """GPUs per node, one rank for each: ``8``, or with their type ``a100:8``. With device cpu, ranks per node."""
    gpus_per_rank: int = 1
    """GPUs per rank, for models that span several: ``gpus_per_node // gpus_per_rank`` ranks per node, also with device
    cpu. Every rank sees all GPUs of its node, and ``ctx.devices`` are its own."""
    gpu_type: str | None = None
    """Slurm's name of the GPU type. In YAML part of ``gpus_per_node: a100:4``."""
    gpu_request: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    """The option of sbatch that requests the GPUs: ``--gpus-per-node=a100:8``, or ``--gres=gpu:a100:8`` where the site
    expects that. ``none``: no option, where jobs get whole nodes with their GPUs."""
    device: Annotated[Literal["cuda", "cpu"], Option("--device cuda|cpu", "cuda (NCCL, the default) or cpu (gloo)")] = (
        "cuda"
    )
    """``cpu`` requests no GPUs and uses gloo."""
    time_s: Annotated[
        int | None,
        Named("time"),
        TIME,
        Option("-t, --time TIME", "time limit of each job, such as 8:00:00. The run continues after the limit"),
    ] = None
    """The time limit of one job. None: the partition's default. YAML takes sbatch's formats: minutes, M:S, H:M:S, D-H,
    D-H:M, D-H:M:S."""
    time_min_s: Annotated[int | None, Named("time_min"), TIME, Sbatch()] = None
    """The shortest time limit that a job may get. Slurm may start it sooner with a limit between this and ``time``, and
    the run continues in further jobs. None: always ``time``."""
    partition: Annotated[Word | None, Sbatch(), Option("-p, --partition NAME", "partition, as in sbatch")] = None
    """The partition, as in sbatch. None: the site's default."""
    account: Annotated[Word | None, Sbatch(), Option("-A, --account NAME", "account to charge, as in sbatch")] = None
    """The account to charge, as in sbatch. None: the site's default."""
    qos: Annotated[Word | None, Sbatch(), Option("-q, --qos NAME", "quality of service, as in sbatch")] = None
    """The quality of service, as in sbatch. None: the site's default."""
    constraint: Annotated[
        Word | None, Sbatch(), Option("-C, --constraint FEATURES", "features that nodes must have, as in sbatch")
    ] = None
    """Features that nodes must have, as in sbatch."""
    reservation: Annotated[Word | None, Sbatch()] = None
    """The reservation, as in sbatch."""
    exclude: Annotated[
        Word | None, Sbatch(), Option("-x, --exclude NODES", "nodes that the job must not have, as in sbatch")
    ] = None
    """Nodes to avoid, as a host list such as ``n[1-4]``."""
    nodelist: Annotated[
        Word | None, Sbatch(), Option("-w, --nodelist NODES", "nodes that the job must have, as in sbatch")
    ] = None
    """Nodes to use, as a host list."""
    mem: Annotated[
        str | None,
        MEMORY,
        Sbatch(),
        Option("--mem SIZE", "memory per node, such as 64G (default: in proportion to the node's GPUs)"),
    ] = None
    """Memory per node with its unit, such as ``64G``. ``0`` means all, and ``none`` requests none. None: in proportion
    to the GPUs."""
    cpus_per_task: Annotated[
        int | None, Option("-c, --cpus-per-task N", "CPUs per rank (default: in proportion to the node's GPUs)")
    ] = None
    """CPUs per rank. None: in proportion to the GPUs."""
    snapshot: Annotated[
        bool | str | None,
        kinds.SNAPSHOT,
        Option(
            "--no-snapshot",
            "run the code that is in the checkout when an attempt starts, instead of a snapshot",
            sets=False,
        ),
    ] = None
    """Whether a submission takes a snapshot of the code. A size such as ``500M`` limits it. None: a batch job
    whose program is in a git repository takes one of at most 100 MB."""
    hook: Annotated[tuple[str, ...], kinds.COMMAND] = ()
    """A command that the supervisor starts when the run is preempted, resumed, stopped, or over, with the event on its
    standard input. YAML: a list of words, or one line for ``sh``."""
    setup: Annotated[tuple[str, ...], kinds.SHELL_LINES] = ()
    """Shell lines that run on the first node before the ranks start. They follow those of configuration files. In place
    of these: ``setup: {replace: [module load cuda]}``."""
    node_setup: Annotated[tuple[str, ...], kinds.SHELL_LINES] = ()
    """Shell lines that run on every node of a job, spare ones included, once before the ranks start. The first line
    that fails ends them, and no rank starts. They may take ``timeouts.nodes_s`` and add up as those of ``setup``."""
    env: Annotated[dict[str, str], kinds.VARIABLES, Placeholders()] = field(default_factory=dict)
    """Environment variables for the ranks, with placeholders as in ``args``."""
    python: Annotated[str | None, kinds.PYTHON] = None
    """The Python interpreter of the ranks. ``$NAME`` in it is a variable on the first node after ``setup``. Where it
    lacks clusterddp, ranks use that of the submission. None: the interpreter of the submission, or ``python3`` of the
    image that an option of srun names."""
    stage: Annotated[str | None, kinds.STAGE] = None
    """A folder on a disk of every node, such as ``/tmp`` or ``$SLURM_TMPDIR``, to which the environment of the ranks'
    interpreter is copied before they start. None: they use the shared one."""
    sbatch: Annotated[dict[str, str | bool], slurm_options(_keys)] = field(default_factory=dict)
    """Other long options of sbatch, without dashes. True: an option without a value. False: not given."""
    srun: Annotated[dict[str, str | bool], slurm_options(_keys, ONE_GPU_PER_TASK)] = field(default_factory=dict)
    """The same for the srun that starts the ranks, such as ``container-image`` of pyxis."""
    steps: Annotated[int | None, kinds.Steps(), Parts("see_steps", "step_log"), kinds.ONE_SCRIPT] = None
    """The number of steps for ``run.steps()`` without an argument. For scripts that do not use clusterddp: ``off`` does
    not count the steps of torch's optimizers, and ``{log: 'iter (\\d+)'}`` finds them in rank 0's output."""
    see_steps: bool = True
    """Whether ranks count the steps of torch's optimizers, for a script that does not use clusterddp. In YAML, ``steps:
    off`` means that they do not."""
    step_log: str | None = None
    """A regular expression whose first group is the step in the lines that rank 0 prints. YAML: ``steps: {log: 'iter
    (\\d+)'}``."""
    protect_saves: bool = True
    """Whether ``torch.save`` and safetensors' ``save_file`` replace a file only by a complete one, and a stop waits for
    them."""
    seed: Annotated[int | None, whole(0), Frozen()] = None
    """The seed of the sample order and of all random generators. It takes precedence over that of
    ``clusterddp.init(seed=...)``. None: the script's, or 0."""
    global_batch: Annotated[int | None, Frozen(if_given=True)] = None
    """Samples per step over all ranks, for any number of ranks. The loader's batch_size is then the maximum that a rank
    takes at once. None: batch_size times the ranks of the first attempt."""
    checkpoint: Checkpointing = field(default_factory=Checkpointing)
    """When checkpoints are saved and which are kept, such as ``{every: 500 steps, keep: 3}``."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    """Timeouts of the process group and of the nodes' setup, and the notice before the time limit."""
    watchdog: Annotated[Watchdog | None, OrOff(Section(Watchdog))] = field(default_factory=Watchdog)
    """None, in YAML ``off``: a hung run continues until its time limit or the process group's timeout."""
    progress_interval: Annotated[float | None, OrOff(positive("seconds"))] = 10.0
    """Seconds between the progress lines in rank 0's log, with the step, the speed and the newest metrics. None, in
    YAML ``off``: no such lines."""
    limits: Limits = field(default_factory=Limits)
    """How much the run may use before it ends as failed."""
    continues: Annotated[bool, Named("continue")] = True
    """Whether the run continues by itself, in a requeue or a new job, after its job has ended. False: it then waits
    until you submit it again. Restarts in the same job, and local runs, are not affected."""
    policy: Literal["requeue", "resubmit"] | None = None
    """How a preempted run continues: ``requeue`` keeps the job id and its age, but Slurm holds the job for a while.
    ``resubmit`` submits a new job. None: requeue if the cluster allows it, otherwise resubmit."""
    expedite_requeue: bool = False
    """Whether Slurm may start a requeued job again at once, and first in line after a lost node. Needs Slurm 25.11 or
    newer and a site that allows it (SlurmctldParameters=enable_expedited_requeue). Elsewhere, it has no effect."""
    lift_hold: bool = True
    """Whether ``submit --wait`` and ``wait --resubmit`` release a requeued job from Slurm's hold. Owners may do so,
    but some sites ask their users not to."""
    interface: Annotated[tuple[str, ...], kinds.INTERFACES] = ()
    """The network interface that the nodes of a job use: ``ib0``, or a list of which each node uses the first that it
    has. For connections between supervisor and ranks, MASTER_ADDR, gloo and NCCL. Empty: the one on the route to the
    other nodes, and NCCL chooses its own."""
    backend: Annotated[Literal["nccl", "gloo"] | None, kinds.BACKEND] = None
    """The process group's backend. None: gloo for cpu, and for cuda NCCL, with gloo for tensors on the CPU."""
    node_memory: Annotated[
        bool, Option("--no-node-memory", "also use nodes on which other runs failed", sets=False)
    ] = True
    """Whether new jobs avoid nodes on which other runs failed, and whether this run's failures are recorded for
    them."""
    keep_logs: int = 50
    """The number of newest attempts whose logs are kept. Those of the first attempt are always kept."""
    share: Literal["private", "group"] = "private"
    """Who may read the run directory: its owner, or also its group."""
    preflight: bool = False
    """Whether to check each node (devices, folder, clock, all-reduce) before its first attempt."""
    trackers: Annotated[Mapping[str, Any], NoKey()] = field(default_factory=dict)
    """What the keys of the trackers give, by key, for those that the run sends its metrics to: ``wandb: digits``."""

    def arguments(self, resumes: bool) -> tuple[str, ...]:
        """The script's arguments, with their placeholders. ``resumes``: whether it has a checkpoint."""
        if self.resume is None or not resumes:
            return self.args
        base = self.args if self.resume.replace is None else self.resume.replace
        return with_overrides(base, self.resume.args) if self.hydra else (*base, *self.resume.args)

    def debugged(self) -> Job:
        """The job with a rank in a debugger, for which the others wait."""
        timeouts = replace(self.timeouts, start_s=DEBUGGED_S, step_s=DEBUGGED_S, connect_s=DEBUGGED_S)
        return replace(self, watchdog=None, timeouts=timeouts)

    @property
    def in_image(self) -> bool:
        """Whether an option of srun starts the ranks in an image, in which only their Python is known."""
        return any(self.srun.get(option) for option in (*PYXIS, "container", "environment"))

    @property
    def python_of_ranks(self) -> str | None:
        """The ranks' interpreter, or None if it is that of the submission."""
        return self.python or ("python3" if self.in_image else None)

    @property
    def ranks_per_node(self) -> int:
        """Ranks per node."""
        return self.gpus_per_node // self.gpus_per_rank

    @property
    def world_size(self) -> int:
        """The number of ranks. The maximum if the number of nodes is a range."""
        return self.nodes * self.ranks_per_node

    @property
    def node_counts(self) -> range:
        """The possible numbers of nodes of an attempt."""
        return range(self.min_nodes or self.nodes, self.nodes + 1)

    @property
    def nodes_text(self) -> str:
        """The number of nodes with ranks as sbatch takes it: ``2`` or ``2-4``."""
        return str(self.nodes) if self.min_nodes is None else f"{self.min_nodes}-{self.nodes}"

    @property
    def allocated_text(self) -> str:
        """The same with the spare nodes. In a range, fewer of them are as good."""
        most = self.nodes + self.spare_nodes
        return str(most) if self.min_nodes is None else f"{self.min_nodes}-{most}"

    @property
    def least_allocated(self) -> int:
        """The number of nodes without which the job does not start."""
        return self.min_nodes or self.nodes + self.spare_nodes

    @property
    def outlives_nodes(self) -> bool:
        """Whether the job continues on its other nodes when it loses one."""
        return self.spare_nodes > 0 or self.min_nodes is not None

    @property
    def time_text(self) -> str | None:
        """The time limit as D-HH:MM:SS, or None."""
        return time_text(self.time_s)

    @property
    def shape(self) -> str:
        """The shape in words: ``2 nodes x 8 GPUs per node = 16 ranks``, ``2 to 4 nodes x ... = 16 to 32 ranks``, or
        ``2 nodes + 1 spare x ...``."""
        if self.device == "cpu":
            per_node, note = counted(self.ranks_per_node, "process", "processes"), f"{self.backend or 'gloo'} on CPU"
            note += f", each in place of {self.gpus_per_rank} GPUs" if self.gpus_per_rank > 1 else ""
        else:
            kind = f"{self.gpu_type} GPU" if self.gpu_type else "GPU"
            per_node, note = counted(self.gpus_per_node, kind), self.backend if self.backend == "gloo" else ""
            if self.gpus_per_rank > 1:
                per_node += f" ({self.gpus_per_rank} per rank)"
        nodes, ranks = counted(self.nodes, "node"), counted(self.world_size, "rank")
        if self.min_nodes is not None:
            nodes, ranks = f"{self.min_nodes} to {nodes}", f"{self.min_nodes * self.ranks_per_node} to {ranks}"
        if self.spare_nodes:
            nodes += f" + {counted(self.spare_nodes, 'spare')}"
        return f"{nodes} x {per_node} per node = {ranks}{f' ({note})' if note else ''}"

    def to_yaml(self) -> str:
        """The definition as YAML, including built-in defaults. ``load_resolved`` reads it back as an equal object."""
        values = {key: value for key, value in written(self).items() if value not in (None, (), {})}
        return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**20)


class _TrackerEntry(Entry):
    """The key of a tracker, whose value is in ``Job.trackers``."""

    def __init__(self, key: str) -> None:
        super().__init__(key, (key,), TRACKERS[key].kind, Job, (Text(TRACKERS[key].meaning),))

    def write(self, owner: object) -> Any:
        """The value in YAML."""
        assert isinstance(owner, Job)
        return self.kind.write(owner.trackers.get(self.name))


class _SiteEntry(Entry):
    """The profile of a site, which gives values to other keys. A job has only these (``with_site``)."""

    def __init__(self) -> None:
        meaning = (
            "The name of a site, such as `lumi`: the values of its profile apply below all others. `clusterddp config "
            "sites` lists them. The job.yaml of a run has the values instead."
        )
        super().__init__("site", (), kinds.SITE, Job, (Text(meaning), NotIn(("presets",))))

    def read(self, node: Node, prefix: str, mistakes: list[Mistake]) -> dict[str, Any]:
        """No value of a field."""
        self.kind.read(node, f"{prefix}{self.name}", mistakes)
        return {}

    def write(self, owner: object) -> Any:  # noqa: ARG002
        """Nothing."""
        return None


#: Every key of a job definition.
KEYS: Mapping[str, Entry] = {**entries(Job), "site": _SiteEntry(), **{key: _TrackerEntry(key) for key in TRACKERS}}

# --- from a job to text


def written(job: Job) -> dict[str, Any]:
    """The values of a job by YAML key."""
    return table.written(job, KEYS)


def one_line(value: Any) -> str:
    """A value as YAML on one line."""
    return yaml.dump([value], Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=2**20).strip()[1:-1]


class _Dumper(yaml.SafeDumper):
    """Escapes characters that are not printable: PyYAML would fold U+0085 into a space. Writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _Dumper.represent_text)


#: Words in the names of metrics whose smallest value is best by default.
_SMALLEST = ("loss", "error", "err", "perplexity", "ppl", "nll", "mse", "mae", "wer", "cer", "fid")


def best_metric(text: str) -> tuple[str, bool] | None:
    """The metric, and whether its smallest value is best, or None if the text is not one.

    ``max``, ``min`` or a minus sign decide, else the name: of ``loss`` and ``val_error`` the smallest, of others the
    largest.
    """
    match = re.fullmatch(r"(-?)([^\s-]\S*)(?: (max|min))?", text)
    if match is None or (match[1] and match[3]):
        return None
    minus, metric, order = match.groups()
    return metric, bool(minus) or (order == "min" if order else is_loss(metric))


def is_loss(metric: str) -> bool:
    """Whether the smallest value of a metric of this name is best."""
    return any(word in _SMALLEST or word.endswith("loss") for word in re.split("[^a-z]+", metric.lower()))
