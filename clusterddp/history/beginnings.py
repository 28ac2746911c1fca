"""How an attempt begins: submission, start, and what it resumes from."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clusterddp.history.event import Event, Reported
from clusterddp.reporter import counted, duration


@dataclass(frozen=True, kw_only=True)
class Forked(Event):
    """`submit --fork` copied checkpoint `step` of the run `source`"""

    step: int
    source: str

    def sentence(self) -> str:
        return f"starts from checkpoint {self.step} of {self.source}"


@dataclass(frozen=True, kw_only=True)
class Submitted(Event):
    """when the job was submitted"""

    job: str
    submitted: float

    def sentence(self) -> str:
        return f"submitted as job {self.job}"


@dataclass(frozen=True, kw_only=True)
class Started(Event):
    """the ranks are being started. The job also has the idle nodes `spares`, and `aside`, which the run has left"""

    nodes: str
    ranks: int
    code: Mapping[str, Any]
    changed: Sequence[str]
    job: str | None = None
    restarts: int | None = None
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


@dataclass(frozen=True, kw_only=True)
class Staged(Event):
    """the ranks use the copy `folder` of the environment `prefix` on each node. `unpacked`: the nodes that have just
    got it"""

    prefix: str
    folder: str
    unpacked: Sequence[str]
    seconds: float

    def sentence(self) -> str:
        where, took = counted(len(self.unpacked), "node"), duration(self.seconds)
        new = f", unpacked on {where} in {took}" if self.unpacked else ""
        return f"the ranks use the copy of {self.prefix} in {self.folder} of each node{new}"


@dataclass(frozen=True, kw_only=True)
class Unstaged(Event):
    """the ranks use the shared environment, because its copy could not be used on every node, and `why`. `node`: the
    first such node"""

    why: str
    node: str | None = None

    def sentence(self) -> str:
        where = "" if self.node is None else f"node {self.node}: "
        return f"NOT STAGED, so the ranks use the shared environment and may start slowly. {where}{self.why}"


@dataclass(frozen=True, kw_only=True)
class Allocated(Event):
    """when the job was queued, could start, and got its nodes. For a task of an array, also how many may run at a
    time"""

    begun: float
    submitted: float | None = None
    eligible: float | None = None
    limit: int | None = None


@dataclass(frozen=True, kw_only=True)
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
            written = f"{self.file}, saved {duration(self.before_s)} before the stop"
            given = f". The script starts with {shlex.join(self.arguments)}" if self.arguments else ""
            return f"the newest checkpoint of the script is {written}{given}{passed}"
        if self.attempt == 0:
            return passed.removeprefix(". ")
        start = (
            ". The script starts from the beginning. If it has saved a checkpoint, correct `resume.checkpoint` and "
            "submit with --change"
        )
        return f"no complete checkpoint matches {' or '.join(self.patterns)}{start if self.from_start else ''}{passed}"


@dataclass(frozen=True, kw_only=True)
class Rejoined(Event):
    """the rank lost its connection to the supervisor and reconnected"""

    host: str
    pid: int
    address: str

    def sentence(self) -> str:
        return f"rank {self.rank} ({self.host}) lost its connection to the supervisor and reconnected"


@dataclass(frozen=True, kw_only=True)
class Preflight(Reported):
    """the nodes have passed the checks of `preflight: true`"""

    seconds: float
    warnings: Sequence[str]

    def sentence(self) -> str:
        warnings = f", with warnings: {', '.join(self.warnings)}" if self.warnings else ""
        return f"all nodes passed the preflight in {self.seconds:.1f} s{warnings}"


@dataclass(frozen=True, kw_only=True)
class Phase(Reported):
    """rank 0 has begun the phase `phase`"""

    phase: str


@dataclass(frozen=True, kw_only=True)
class Initialized(Reported):
    """a part starts from a file: `ctx.run(init_from=...)`"""

    part: str
    file: str
    missing: Sequence[str]
    unexpected: Sequence[str]

    def sentence(self) -> str:
        sides = (("Missing in the file", self.missing), ("Not in the model", self.unexpected))
        lists = "".join(f". {what}: {', '.join(keys[:5])}{', ...' * (len(keys) > 5)}" for what, keys in sides if keys)
        return f"{self.part} starts from {self.file}{lists}"


@dataclass(frozen=True, kw_only=True)
class Beginning(Reported, abstract=True):
    """Rank 0 begins its loop at a step. ``redone``: how many steps of earlier attempts are repeated."""

    step: int
    redone: int | None = None


@dataclass(frozen=True, kw_only=True)
class Training(Beginning):
    """the attempt starts from step 0. If rank 0 prints step numbers, it starts from the step before the first number
    that rank 0 prints, which is `log`"""

    log: int | None = None

    def sentence(self) -> str | None:
        return None if self.log is None else f"rank 0 prints step numbers from {self.log} on{_repeated(self.redone)}"


@dataclass(frozen=True, kw_only=True)
class Resumed(Beginning):
    """the attempt resumes from checkpoint `step` of attempt `parent`"""

    parent: Mapping[str, int]
    inexact: Sequence[str] = ()

    def sentence(self) -> str:
        inexact = f". The resume is not bit-exact: {', '.join(self.inexact)}" if self.inexact else ""
        return f"resumed from step {self.step}{_repeated(self.redone)}{inexact}"


@dataclass(frozen=True, kw_only=True)
class NotRestored(Reported):
    """after the first step of a resumed attempt, the modules have attributes that differ from the checkpoint's"""

    step: int
    inexact: Sequence[str]

    def sentence(self) -> str:
        return f"the resume is not bit-exact: {', '.join(self.inexact)}"


@dataclass(frozen=True, kw_only=True)
class NotUsed(Reported):
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


@dataclass(frozen=True, kw_only=True)
class OwnCheckpointRead(Reported):
    """the script has opened its own checkpoint `file` before its first steps, or later, after `not_read`"""

    file: str

    def sentence(self) -> str:
        return f"resumed from {self.file}, which the script has read"


@dataclass(frozen=True, kw_only=True)
class NotRead(Reported):
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
