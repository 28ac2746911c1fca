"""The events of a run's history: each is a class with its fields, its meaning and its sentence.

A line of ``events.jsonl`` has an event's fields, and besides them ``time`` (unix seconds), ``attempt`` and ``event``,
the class's name in snake case. Ranks report some of them over the control channel. The supervisor writes all events,
and adds ``rank`` to a rank's. A field with a default may be missing. An event without a sentence is only recorded.

docs/reference/events.md is generated from this module, and a test compares it with what the code writes and reads.
"""

from __future__ import annotations

import inspect
import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from clusterddp.reporter import counted, duration, in_one_line

#: The most characters of a reason that a sentence shows.
LONGEST_REASON = 500
#: What follows most failures.
RESTARTING = "restarting all ranks in place"
#: ``then`` of an attempt that is ``stopped`` while Slurm is requeueing its job by itself.
BY_SLURM = "requeued by Slurm"
#: How a run can end; also the "state" in outcome.json.
RUN_ENDS = ("completed", "failed", "cancelled")
#: After these an attempt has no ranks.
ATTEMPT_ENDS = ("restarted", "requeued", "resubmitted", "stopped", *RUN_ENDS)
#: Events of an attempt that never started its ranks. Any other event shows that it did, even if `started` is missing.
WITHOUT_RANKS = frozenset(("submitted", "forked", *RUN_ENDS))
#: What rank 0 can be doing outside of saves: ``report/booking.py`` books the time by it.
PHASES: Mapping[str, str] = {
    "importing": "the script's imports, and all else that it does before its loop, such as building the model",
    "rendezvous": "clusterddp.init() waits for all ranks",
    "restoring": "ctx.run() checks its parts and restores the newest checkpoint",
    "first_step": "the first step of the attempt: compilation, the first collectives, the first batch",
    "repeating": "steps that an earlier attempt completed, but did not save",
    "training": "steps",
    "after_loop": "what the script does after its loop, other than evaluations",
    "ending": "the script has ended",
}
#: The events that call the hook of a job definition.
HOOK_EVENTS: Mapping[str, str] = {
    "preempted": "the job is being preempted, and the run continues: it is requeued or resubmitted",
    "resumed": "an attempt continues from a checkpoint",
    "stopped": "the run is stopped until you continue it",
    "completed": "all ranks finished",
    "failed": "the run failed",
    "cancelled": "the run was cancelled while an attempt ran",
}
#: The sentence of an event that both the rank and the supervisor print.
HANDLER_REPLACED = (
    "the script replaced the {signal} handler of clusterddp.init() with {handler}. If that handler exits or raises, "
    "the steps since the last checkpoint are repeated. Remove it, because clusterddp saves and stops the run"
)
#: The same, of a process that a rank has started and the supervisor.
NO_RANK = (
    "clusterddp.stop_requested() is always False in a process that a rank has started. Let clusterddp start one rank "
    "per GPU (--gpus) instead of starting processes in the script (torch.multiprocessing.spawn)"
)
#: What to do about ranks that train apart.
CHECK_SCRIPT = "Check the script's options for distributed training"
#: What to do about a completion that is not confirmed.
CONFIRM = (
    "If the training is complete, name the file that marks it: `clusterddp submit [--local] --run-dir RUN --change "
    "--set done=FILE`. If not, fix the cause and continue with `clusterddp submit [--local] --run-dir RUN`"
)


def sentence(event: Mapping[str, Any]) -> str | None:
    """One line for an event. None for events that are only recorded."""
    kind = EVENTS.get(event["event"])
    try:
        text = None if kind is None else kind(event).sentence()
    except (KeyError, TypeError, ValueError, AttributeError):  # damaged, or written by another version of clusterddp
        text = event["event"]
    return f"attempt {event['attempt']}: {in_one_line(text)}" if text else None


def at_step(step: int | None) -> str:
    """`` at step 7``, or nothing if no step was recorded, as with a script that does not use clusterddp."""
    return "" if step is None else f" at step {step}"


def last_save_retried(step: int, seconds: float, folder: str) -> str:
    """The sentence of ``last_save_retried``, which the rank also prints."""
    return (
        f"all {step} steps are done, but the last checkpoint is not saved. The ranks keep the state in memory and "
        f"retry for up to {duration(seconds)}. Free space on the disk with {folder}, for example by deleting old runs, "
        "or make it writable"
    )


def gpu_fault(event: GpuFault) -> str:
    """``Xid 79 on n3 GPU 5: the GPU has fallen off the bus``."""
    place = f"{event.host}{'' if event.gpu is None else f' GPU {event.gpu}'}"
    return f"{'a fault' if event.xid is None else f'Xid {event.xid}'} on {place}: {event.what}"


class Event:
    """A line of the history. Reading a field that is missing, and has no default, raises AttributeError."""

    name: ClassVar[str]
    #: The names of the fields, as in ``step? reason`` if ``step`` may be missing.
    fields: ClassVar[str]
    attempt: int
    rank: int

    def __init_subclass__(cls) -> None:
        cls.name = re.sub("(?<=.)(?=[A-Z])", "_", cls.__name__).lower()
        below_event = reversed(cls.__mro__[: cls.__mro__.index(Event)])
        names = [name for part in below_event for name in inspect.get_annotations(part)]
        cls.fields = " ".join(f"{name}?" if hasattr(cls, name) else name for name in names)
        if not cls.__name__.startswith("_"):
            EVENTS[cls.name] = cls

    def __init__(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def sentence(self) -> str | None:
        """The event in words."""
        return None


EVENTS: dict[str, type[Event]] = {}


# --- an attempt begins


class Forked(Event):
    """`submit --fork` copied checkpoint `step` of the run `source`"""

    step: int
    source: str

    def sentence(self) -> str:
        return f"starts from checkpoint {self.step} of {self.source}"


class Submitted(Event):
    """when the job was submitted"""

    job: str
    submitted: float

    def sentence(self) -> str:
        return f"submitted as job {self.job}"


class Started(Event):
    """the ranks are being started. The job also has the idle nodes `spares`, and `aside`, which the run has left"""

    nodes: str
    ranks: int
    code: str
    changed: Sequence[str]
    job: str | None = None
    restarts: int = 0
    pid: int | None = None
    seen: float | None = None
    spares: Sequence[str] = ()
    aside: Sequence[str] = ()

    def sentence(self) -> str:
        who = f"process {self.pid}" if self.job is None else f"job {self.job}"
        idle = (("spare", self.spares), ("not used", self.aside))
        again = "".join(f", {what}: {' '.join(nodes)}" for what, nodes in idle if nodes)
        again += f", restart {self.restarts}" if self.restarts else ""
        changed = f". The code has changed since the last attempt: {', '.join(self.changed)}" if self.changed else ""
        return f"started ({who} on {self.nodes}{again}){changed}"


class Allocated(Event):
    """when the job was queued, could start, and got its nodes. For a task of an array, also how many may run at a
    time"""

    begun: float
    submitted: float | None = None
    eligible: float | None = None
    limit: int | None = None


class OwnResume(Event):
    """the script's newest own checkpoint is `file`, and the script gets these arguments. Without `file`: none of
    `patterns` matches a complete one"""

    file: str | None = None
    written: float | None = None
    before_s: float = 0.0
    arguments: Sequence[str] = ()
    passed_over: Sequence[str] = ()
    patterns: Sequence[str] = ()
    from_start: bool = False

    def sentence(self) -> str | None:
        passed = f". Not used: {', '.join(self.passed_over)}" if self.passed_over else ""
        if self.file is not None:
            written = f"{self.file}, written {duration(self.before_s)} before the stop"
            given = f". The script starts with {shlex.join(self.arguments)}" if self.arguments else ""
            return f"the newest checkpoint of the script is {written}{given}{passed}"
        if self.attempt == 0:
            return passed.removeprefix(". ")
        start = (
            ". The script starts from the beginning. If it has saved a checkpoint, correct `resume.checkpoint` and "
            "submit with --change"
        )
        return f"no complete checkpoint matches {' or '.join(self.patterns)}{start if self.from_start else ''}{passed}"


class Rejoined(Event):
    """the rank lost its connection to the supervisor and reconnected"""

    host: str
    pid: int
    address: str

    def sentence(self) -> str:
        return f"rank {self.rank} ({self.host}) lost its connection to the supervisor and reconnected"


class Preflight(Event):
    """the nodes have passed the checks of `preflight: true`"""

    seconds: float
    warnings: Sequence[str]

    def sentence(self) -> str:
        warnings = f", with warnings: {', '.join(self.warnings)}" if self.warnings else ""
        return f"all nodes passed the preflight in {self.seconds:.1f} s{warnings}"


class Phase(Event):
    """rank 0 has begun the phase `phase`"""

    phase: str


class Initialized(Event):
    """a part starts from a file: `ctx.run(init_from=...)`"""

    part: str
    file: str
    missing: Sequence[str]
    unexpected: Sequence[str]

    def sentence(self) -> str:
        sides = (("Missing in the file", self.missing), ("Not in the model", self.unexpected))
        lists = "".join(f". {what}: {', '.join(keys[:5])}{', ...' * (len(keys) > 5)}" for what, keys in sides if keys)
        return f"{self.part} starts from {self.file}{lists}"


class Training(Event):
    """the attempt starts from step 0. If rank 0 prints step numbers, it starts from the step before the first number
    that rank 0 prints, which is `log`"""

    step: int
    redone: int | None = None
    log: int | None = None

    def sentence(self) -> str | None:
        return None if self.log is None else f"rank 0 prints step numbers from {self.log} on{_repeated(self.redone)}"


class Resumed(Event):
    """the attempt resumes from checkpoint `step` of attempt `parent`"""

    step: int
    parent: Mapping[str, int]
    inexact: Sequence[str] = ()
    redone: int | None = None

    def sentence(self) -> str:
        inexact = f". The resume is not bit-exact: {', '.join(self.inexact)}" if self.inexact else ""
        return f"resumed from step {self.step}{_repeated(self.redone)}{inexact}"


class NotRestored(Event):
    """after the first step of a resumed attempt, the modules have attributes that differ from the checkpoint's"""

    step: int
    inexact: Sequence[str]

    def sentence(self) -> str:
        return f"the resume is not bit-exact: {', '.join(self.inexact)}"


class NotUsed(Event):
    """a value that the script was given, or gives itself, has no effect, because another takes precedence"""

    what: str
    given: Any
    because: str
    used: Any = None

    def sentence(self) -> str:
        used = "" if self.used is None else f" {self.used!r}"
        return f"{self.what}: {self.given!r} is not used. {self.because}{used}"


def _repeated(redone: int | None) -> str:
    return "" if redone is None else f", repeating {counted(redone, 'step')}"


class OwnCheckpointRead(Event):
    """the script has opened its own checkpoint `file` before its first steps"""

    file: str

    def sentence(self) -> str:
        return f"resumed from {self.file}, which the script has read"


class NotRead(Event):
    """the script has made its first steps, or ended, without opening `file`, its newest checkpoint. It repeats at least
    `redone` steps"""

    file: str
    redone: int | None = None

    def sentence(self) -> str:
        repeats = "" if self.redone is None else f" and repeats at least {counted(self.redone, 'step')}"
        return (
            f"NOT RESUMED: the script did not read {self.file}. It began again{repeats}, unless it loaded a file that "
            "clusterddp does not know. Check whether the script can resume, and which option makes it load that file"
        )


# --- steps


class Progress(Event):
    """a loop to `steps` begins, or has just ended, at `step`"""

    step: int
    steps: int


class StepsSeen(Event):
    """rank 0 has completed its first step, of unknown number, in a script without clusterddp. `out` and `err`: the
    sizes of its output files in bytes"""

    out: int | None = None
    err: int | None = None


class ChildStep(Event):
    """a process that the script has started with multiprocessing has made a step, of unknown number"""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


class ChildDied(Event):
    """a `process` that the script has started on the rank exited with this code, or was killed by signal -`code`"""

    process: str
    pid: int
    code: int

    def what(self) -> str:
        """``process Process-1 (pid 4711) of rank 0 was killed by SIGKILL``."""
        how = f"was killed by {_signal_name(-self.code)}" if self.code < 0 else f"exited with code {self.code}"
        return f"process {self.process} (pid {self.pid}) of rank {self.rank} {how}"

    def sentence(self) -> str:
        return f"{self.what()}. Unless the script ends with an error, the run's completion is unconfirmed"


class Apart(Event):
    """rank 0 has completed its first step in a process group of `group` ranks, or without one"""

    ranks: int
    group: int

    def sentence(self) -> str:
        if self.group > 1:
            return (
                f"the script's process group has {counted(self.group, 'rank')}, but the run has {self.ranks}. Each "
                f"group trains a separate model. {CHECK_SCRIPT}"
            )
        return f"rank 0 trains alone, without a process group, but the run has {self.ranks} ranks. {CHECK_SCRIPT}"


class NoRank(Event):
    """a process that a rank has started calls `clusterddp.stop_requested()`, which is False there"""

    def sentence(self) -> str:
        return NO_RANK


class MicrobatchingSkipped(Event):
    """more samples per rank than batch_size, without `run.micro()`"""

    step: int
    samples: int
    most: int

    def sentence(self) -> str:
        return (
            f"each rank takes {self.samples} samples at once, more than its batch_size of {self.most}, because the "
            "script does not call run.micro(). If this runs out of memory, loop over run.micro(batch)"
        )


class WaitsForData(Event):
    """rank 0 spends `percent` % of its time waiting for batches. Recorded once"""

    step: int
    percent: int
    advice: str

    def sentence(self) -> str:
        advice = f"{self.advice[:1].upper()}{self.advice[1:]}"
        return f"rank 0 spent {self.percent}% of its recent steps waiting for data. {advice}"


class DeviceMemory(Event):
    """the most GPU memory that rank 0's allocator has reserved, after its first step"""

    bytes: int


class NotFinite(Event):
    """metrics became NaN or infinite"""

    step: int
    metrics: Mapping[str, str]
    count: int

    def sentence(self) -> str:
        (metric, value), *others = self.metrics.items()
        more = max(len(others), self.count - 1)
        also = f", and {counted(more, 'other metric')} became NaN or infinite" if more else ""
        return f"{metric} became {value} at step {self.step}{also}. Training continues"


class _Explained(Event):
    step: int
    explanation: str

    def sentence(self) -> str:
        return str(self.explanation)


class UnevenCalls(_Explained):
    """some ranks call `run.every()` more often than others. Recorded once"""


class ShortEpochs(_Explained):
    """a step takes more samples than the dataset has, so an epoch is less than a step"""


class NotGiven(_Explained):
    """the script steps an optimizer or a scheduler that `ctx.run()` did not receive"""


class ShapesChanged(_Explained):
    """`torch.compile` has seen changing shapes. Recorded once"""


class GroupAdded(_Explained):
    """an optimizer has received a further group of parameters after `ctx.run()`"""


class Diverged(_Explained):
    """the state differs between ranks"""

    parts: Sequence[str]


class Tracker(Event):
    """a tracker does not get all values. Training continues"""

    tracker: str
    problem: str

    def sentence(self) -> str:
        return f"{self.tracker} {self.problem}"


class Evaluated(Event):
    """rank 0 has spent `seconds` in evaluations since the last such event"""

    seconds: float


class Result(Event):
    """`run.log()` outside a step. The logged values are further fields"""

    step: int


# --- checkpoints


class Interval(Event):
    """`every: auto` chose a new interval between checkpoints"""

    step: int
    seconds: float
    stall_s: float
    between_s: float

    def sentence(self) -> str:
        return (
            f"saving every {self.seconds:.0f} s, because a save blocks training for {1000 * self.stall_s:.0f} ms and "
            f"an interruption is expected every {self.between_s / 3600:.1f} hours"
        )


class Checkpoint(Event):
    """a checkpoint is committed. `best`: the metric in which it is the best"""

    step: int
    blocked_s: float
    durable_s: float
    bytes: int
    best: Mapping[str, Any] | None = None


class RoomMade(Event):
    """the disk was full. The older checkpoints `deleted` made room for `step`"""

    step: int
    deleted: Sequence[int]

    def sentence(self) -> str:
        return (
            f"the disk is full. Deleted checkpoint{'s' * (len(self.deleted) > 1)} {', '.join(map(str, self.deleted))} "
            f"to make room for checkpoint {self.step}. Free space, or keep fewer checkpoints (checkpoint.keep)"
        )


class CheckpointFailed(Event):
    """a checkpoint was not saved"""

    step: int
    reason: str

    def sentence(self) -> str:
        return f"could not save checkpoint {self.step}: {self.reason}. The next save tries again"


class LastSaveRetried(Event):
    """all steps are done, but the last checkpoint is not saved: the disk with `folder` is full, read-only or broken.
    The ranks keep the state in memory, and retry for `seconds`, or until they must stop"""

    step: int
    seconds: float
    folder: str

    def sentence(self) -> str:
        return last_save_retried(self.step, self.seconds, self.folder)


class CheckpointDamaged(Event):
    """a checkpoint cannot be read. The previous one is tried"""

    step: int
    reason: str

    def sentence(self) -> str:
        return f"{self.reason}. Trying the previous checkpoint"


class PerRankGrows(Event):
    """the per-rank state takes more than half of the `limit`. Recorded once"""

    step: int
    names: Sequence[str]
    bytes: int
    limit: int

    def sentence(self) -> str:
        return (
            f"the per-rank state of all ranks ({', '.join(self.names)}) takes {self.bytes / 1e6:,.0f} MB, more than "
            f"half of the limit of {self.limit / 1e6:,.0f} MB. If it exceeds the limit, the run fails. state_dict() "
            "should omit values that can be recomputed"
        )


class NoBest(Event):
    """all steps are done, and the metric of the best checkpoint was never logged"""

    metric: str
    logged: Sequence[str]

    def sentence(self) -> str:
        logged = f", only {', '.join(self.logged)}" if self.logged else " or any other metric"
        return f"there is no best checkpoint, because the script never logged {self.metric!r}{logged}"


class Saved(Event):
    """the script has saved its state in `file` and called `requeue(saved=file)`. With `clusterddp.continue_epoch()`
    also the `items` of its epoch that it had trained on, and when the file was `written`"""

    file: str
    items: int | None = None
    written: float | None = None

    def sentence(self) -> str:
        into = "" if self.items is None else f", {counted(self.items, 'item')} into its epoch"
        return f"the script saved {self.file}{into}"


class NoSave(Event):
    """the script has called `requeue(saved=file)`, but rank 0 sees no such file or folder"""

    file: str

    def sentence(self) -> str:
        return (
            f"requeue(saved={self.file!r}): there is no such file or folder. The next attempt continues without it. "
            "Pass the path that the script saved to"
        )


class OwnCheckpoint(Event):
    """the script has written a complete checkpoint in its own format"""

    file: str
    written: float


class OwnCheckpointRejected(Event):
    """the attempt was given `file`, and the script failed before its first step. The next one gets the match before"""

    file: str
    written: float

    def sentence(self) -> str:
        return f"the script failed with {self.file} before its first step. The next attempt gets the match before it"


class NoMatch(Event):
    """the script has saved `file`, and no file matches `patterns`"""

    file: str
    patterns: Sequence[str]

    def sentence(self) -> str:
        return (
            f"the script has saved {self.file}, but no file matches {' or '.join(self.patterns)} so far. If the script "
            "can resume from that file, correct `resume.checkpoint` and submit with --change"
        )


# --- stops and requests


class HandlerReplaced(Event):
    """the script replaced a signal handler of clusterddp"""

    signal: str
    handler: str

    def sentence(self) -> str:
        return HANDLER_REPLACED.format(signal=self.signal, handler=self.handler)


class Signal(Event):
    """a stop signal reached the rank"""

    signal: str


class Notified(Event):
    """the supervisor's request to stop reached the rank"""

    reason: str


class Notice(Event):
    """the supervisor asks the ranks to stop"""

    why: str

    def sentence(self) -> str:
        return f"{self.why}. Asking the ranks to stop"


class Requested(Event):
    """the user asked for `request`. The next jobs exclude `nodes` for a day."""

    request: str
    nodes: Sequence[str] = ()

    def sentence(self) -> str:
        then = "run continue in a new job" if self.nodes else "job be requeued"
        follows = {
            "save": "a checkpoint at the next step boundary",
            "stop": "that all ranks save and stop",
            "requeue": f"that all ranks save and stop, and that the {then}",
            "drain": "that all ranks save, stop and continue",
        }.get(self.request, self.request)
        without = f", without {', '.join(self.nodes)}" if self.nodes else ""
        return f"`clusterddp {self.request}` requested {follows}{without}"


class Overdue(Event):
    """no rank's step ended within `seconds` of the notice. Rank 0 exits. `behind`: the late ranks"""

    seconds: float
    behind: str | None = None

    def sentence(self) -> str:
        behind = f" ({self.behind})" if self.behind else ""
        return (
            f"the step did not end within {self.seconds:.0f} s of the notice{behind}. Rank 0 writes its stacks to "
            "its log and exits. A resume starts from the newest checkpoint. Make steps shorter, or let the run stop in "
            "them with clusterddp.stop_requested() and run.stop()"
        )


class Stopping(Event):
    """all ranks stop after `step`"""

    step: int
    reason: str

    def sentence(self) -> str:
        return f"stop requested ({self.reason}). All ranks stop after step {self.step}"


class Finishing(Event):
    """all steps are done. The last checkpoint is being saved"""

    step: int


class LeftLoop(Event):
    """the script left its loop, with a `break` or an `exception`"""

    step: int
    steps: int
    by: str = ""

    def sentence(self) -> str:
        ways = {"break": "break or return", "exception": "an exception or close()"}
        advice = "" if self.by == "exception" else ". To end a run early, call run.finish(), which saves"
        return (
            f"the script left its loop with {ways.get(self.by, 'break or an exception')} after step {self.step} of "
            f"{self.steps}. Steps since the newest checkpoint are not saved{advice}"
        )


# --- the cluster, and failures


class ControllerAway(Event):
    """Slurm's controller is unreachable. Training continues"""

    error: str

    def sentence(self) -> str:
        return f"Slurm's controller is unreachable, but training continues: {self.error}"


class ControllerBack(Event):
    """Slurm's controller is reachable again"""

    def sentence(self) -> str:
        return "Slurm's controller is reachable again"


class ControllerMissing(Event):
    """Slurm's commands are not installed here"""

    error: str

    def sentence(self) -> str:
        return (
            f"{self.error}. The ranks stop only when they receive a signal, and the cause of a stop will be unknown. "
            "Add Slurm's commands to PATH with `setup` in the job definition"
        )


class Suspended(Event):
    """until now, a rank's process was stopped for `seconds`, and the others waited for it"""

    rank: int
    host: str
    seconds: float

    def sentence(self) -> str:
        return (
            f"rank {self.rank} ({self.host}) was stopped for {duration(self.seconds)}. Its job was suspended, or its "
            "node was frozen"
        )


class Slow(Event):
    """a straggler"""

    rank: int
    host: str
    own_s: float
    ratio: float

    def sentence(self) -> str:
        return (
            f"rank {self.rank} ({self.host}) is slow. It computes for {self.own_s:.3g} s per step, "
            f"{self.ratio:.1f} times the others' median, and they wait for it. Check its node, its CPU and its data"
        )


class SlowNode(Event):
    """the rank has been slow for `seconds`. `facts`: what may slow its node or its GPUs down"""

    host: str
    ratio: float
    seconds: float
    facts: Sequence[str]

    def sentence(self) -> str:
        since = duration(self.seconds)
        facts = f". {'. '.join(self.facts)}" if self.facts else ""
        ratio = f"It computes {self.ratio:.1f} times as long as the others"
        return f"rank {self.rank} ({self.host}) has been slow for {since}. {ratio}{facts}"


class GpuFault(Event):
    """the driver has reported an error of a GPU of the rank, with its number in NVIDIA's list (`xid`). `hardware`: it
    counts against the node"""

    host: str
    what: str
    hardware: bool
    gpu: int | None = None
    xid: int | None = None

    def sentence(self) -> str:
        return gpu_fault(self)


class StragglerRecovered(Event):
    """a straggler is no longer slow"""

    rank: int
    host: str


class Hung(Event):
    """a hang: all ranks are being ended. `suspect`: the node whose GPU hung"""

    rank: int
    late: Sequence[int]
    host: str
    seconds: float
    what: str
    step: int | None = None
    stalled_s: float | None = None
    suspect: str | None = None

    def sentence(self) -> str:
        return f"{self.what}. Terminating all ranks"


class NotConnected(Event):
    """after a minute, ranks have not connected to the others. `late`: these ranks"""

    late: Sequence[int]
    seconds: float
    what: str

    def sentence(self) -> str:
        return f"{self.what}. They may take timeouts.connect_s"


class NodeLost(Event):
    """a node no longer responds, or these ranks did not exit after SIGKILL"""

    node: str
    suspect: str
    unkillable: Sequence[int] = ()

    def sentence(self) -> str:
        if not self.unkillable:
            return f"node {self.node} no longer responds"
        who = f"{'rank' if len(self.unkillable) == 1 else 'ranks'} {', '.join(map(str, self.unkillable))}"
        return f"node {self.node} is treated as lost, because {who} did not exit after SIGKILL. Tell the administrator"


class LaunchFailed(Event):
    """srun has started no rank. `lines`: what it printed. `refused`: it would refuse the same again"""

    error: str
    lines: Sequence[str]
    refused: bool

    def sentence(self) -> str:
        return self.error


class RankFailed(Event):
    """the first failure of the attempt. `raised`: its exception, line and step. `lacks_gpus`: the node has too few.
    `fault`: the fault of its GPU that caused this"""

    rank: int
    host: str
    error: str
    step: int | None = None
    suspect: str | None = None
    since: float | None = None
    raised: str | None = None
    lacks_gpus: bool | None = None
    fault: str | None = None

    def sentence(self) -> str:
        fault = f". {self.fault}" if self.fault else ""
        return f"first failure{at_step(self.step)}: rank {self.rank} ({self.host}) {self.error}{fault}"


class Excluded(Event):
    """nodes that the next jobs exclude, for a day"""

    nodes: Sequence[str]
    failures: Sequence[int]

    def sentence(self) -> str:
        pairs = zip(self.nodes, self.failures, strict=True)
        failed = " and ".join(f"{node} (failed {counted(number, 'time')})" for node, number in pairs)
        return f"the next jobs of this run exclude {failed} for 24 hours"


class NotExcluded(Event):
    """a failed node is not excluded"""

    reason: str

    def sentence(self) -> str:
        return f"no further node is excluded, because {self.reason}"


class Moved(Event):
    """the next attempt starts in the same job, but on `nodes`: it leaves the nodes `aside`, and `why`"""

    nodes: Sequence[str]
    aside: Sequence[str]
    why: str

    def sentence(self) -> str:
        return str(self.why)


# --- an attempt ends


class RequeueRefused(Event):
    """Slurm refused the requeue. The run is resubmitted"""

    error: str

    def sentence(self) -> str:
        return f"Slurm refused the requeue ({self.error}). Resubmitting the run"


class ResubmissionRefused(Event):
    """Slurm refused a new job. The run's job is requeued"""

    error: str

    def sentence(self) -> str:
        return f"Slurm refused a new job ({self.error}). Requeueing this one"


class _Ended(Event):
    """An attempt that ended so that the run continues, now or later."""

    reason: str
    cause: str
    step: int | None
    checkpoint: int | None
    file: str | None = None
    made: int | None = None
    unmarked: bool | None = None

    def ended(self, then: str) -> str:
        """Why it ended, what was saved, what was not, and what happens next."""
        reason, step, checkpoint = self.reason.rstrip("."), self.step, self.checkpoint
        sentences = [reason]
        what, comma, more = reason.partition(", ")
        if step and re.search(r"[.:;]\s", what):  # an exception's text, for example
            sentences.append(f"The attempt ended at step {step}")
        elif step:
            sentences = [f"{what}{at_step(step)}{comma}{more}"]
        if self.file is not None and checkpoint is None:
            sentences.append(f"The newest checkpoint is {self.file}")
        elif step is None:
            if self.made is None:
                sentences.append("No step was recorded")
            else:
                made = f"The attempt completed at least {counted(self.made, 'step')}, and no checkpoint is known"
                sentences += [made, "Unless the script itself resumes, it trains from the beginning"]
        elif step == 0:
            sentences.append("No step was completed")
        elif checkpoint is None:
            sentences.append("No checkpoint was saved")
        elif step > checkpoint:
            repeated = counted(step - checkpoint, "step")
            sentences.append(f"The newest checkpoint is {checkpoint}, so {repeated} will be repeated")
        else:
            sentences.append(f"Checkpoint {checkpoint} is saved")
        return ". ".join([*sentences, then])


class Restarted(_Ended):
    """the ranks are restarted in place. `unended`: the nodes on which srun did not report the end of the ranks"""

    unended: Sequence[str] = ()

    def sentence(self) -> str:
        return self.ended(f"{RESTARTING[0].upper()}{RESTARTING[1:]}")


class Requeued(_Ended):
    """the job is requeued"""

    window_s: float | None

    def sentence(self) -> str:
        return self.ended("The job is requeued")


class Resubmitted(_Ended):
    """the run continues as job `job`"""

    job: str

    def sentence(self) -> str:
        return self.ended(f"The run continues as job {self.job}")


class Stopped(_Ended):
    """the run can be continued. `file`: the script's own checkpoint. `made`: the attempt completed at least this
    many steps. `refused`: why Slurm refused the run's next job, which `clusterddp wait --resubmit` submits again"""

    then: str = "stopped"
    refused: str | None = None

    def sentence(self) -> str:
        return self.ended(f"The run is {self.then}")


class Completed(Event):
    """all ranks finished. `confirmed` is false if that is doubtful: a restarted script may have exited with code 0
    without training"""

    step: int | None
    attempts: int
    reason: str
    confirmed: bool | None = None

    def sentence(self) -> str:
        completed = f"completed{at_step(self.step)} after {counted(self.attempts, 'attempt')}"
        if self.confirmed is False:
            return f"{completed}, {self.reason}. {CONFIRM}"
        return f"{completed} ({self.reason})" if self.reason.startswith("done: ") else completed


class Failed(Event):
    """the run failed"""

    step: int | None
    attempts: int
    reason: str

    def sentence(self) -> str:
        reason = self.reason
        shown = reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]} ..."
        return f"failed{at_step(self.step)}: {shown}"


class Cancelled(Event):
    """the run was cancelled"""

    step: int | None
    attempts: int
    reason: str

    def sentence(self) -> str:
        return f"cancelled{at_step(self.step)}. The run will not start again"


# --- the last of these, as outcome.json


def is_unconfirmed(outcome: Mapping[str, Any]) -> bool:
    """Whether a run completed only by an exit code 0 that may mean something else."""
    return outcome["state"] == "completed" and outcome.get("confirmed") is False


def over_already(run: object, outcome: Mapping[str, Any]) -> str:
    """The message of a command that stops because the run is over."""
    return f"{run}: already {outcome['state']}{at_step(outcome['step'])}"


def how_it_ended(outcome: Mapping[str, Any]) -> str:
    """The state of a run that is over, its step, and the reason if that says more than the state."""
    state, reason = in_one_line(outcome["state"]), in_one_line(outcome["reason"])
    ended = f"{state}{at_step(outcome['step'])}"
    if is_unconfirmed(outcome):
        return f"{ended}, {reason}"
    return f"{ended}: {reason}" if reason != state else ended
