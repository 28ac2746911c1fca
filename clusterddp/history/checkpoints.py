"""Checkpoints, of clusterddp and of the script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clusterddp.history.event import Event, Reported
from clusterddp.reporter import counted, duration


def last_save_retried(step: int, seconds: float, folder: str) -> str:
    """The sentence of ``last_save_retried``, which the rank also prints."""
    return (
        f"all {step} steps are done, but the last checkpoint is not saved. The ranks keep the state in memory and "
        f"retry for up to {duration(seconds)}. Free space on the disk with {folder}, for example by deleting old runs, "
        "or make it writable"
    )


@dataclass(frozen=True, kw_only=True)
class Interval(Reported):
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


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Reported):
    """a checkpoint is committed. `best`: the metric in which it is the best"""

    step: int
    blocked_s: float
    durable_s: float
    bytes: int
    best: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class RoomMade(Reported):
    """the disk was full. The older checkpoints `deleted` made room for `step`"""

    step: int
    deleted: Sequence[int]

    def sentence(self) -> str:
        return (
            f"the disk is full. Deleted checkpoint{'s' * (len(self.deleted) > 1)} {', '.join(map(str, self.deleted))} "
            f"to make room for checkpoint {self.step}. Free space, or keep fewer checkpoints (checkpoint.keep)"
        )


@dataclass(frozen=True, kw_only=True)
class CheckpointFailed(Reported):
    """a checkpoint was not saved"""

    step: int
    reason: str

    def sentence(self) -> str:
        return f"could not save checkpoint {self.step}: {self.reason}. The next save tries again"


@dataclass(frozen=True, kw_only=True)
class LastSaveRetried(Reported):
    """all steps are done, but the last checkpoint is not saved: the disk with `folder` is full, read-only or broken.
    The ranks keep the state in memory, and retry for `seconds`, or until they must stop"""

    step: int
    seconds: float
    folder: str

    def sentence(self) -> str:
        return last_save_retried(self.step, self.seconds, self.folder)


@dataclass(frozen=True, kw_only=True)
class CheckpointDamaged(Reported):
    """a checkpoint cannot be read. The previous one is tried"""

    step: int
    reason: str

    def sentence(self) -> str:
        return f"{self.reason}. Trying the previous checkpoint"


@dataclass(frozen=True, kw_only=True)
class PerRankGrows(Reported):
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


@dataclass(frozen=True, kw_only=True)
class NoBest(Reported):
    """all steps are done, and the metric of the best checkpoint was never logged"""

    metric: str
    logged: Sequence[str]

    def sentence(self) -> str:
        logged = f", only {', '.join(self.logged)}" if self.logged else " or any other metric"
        return f"there is no best checkpoint, because the script never logged {self.metric!r}{logged}"


@dataclass(frozen=True, kw_only=True)
class SavedItself(Event, abstract=True):
    """The script has written a checkpoint in its own format."""

    file: str
    written: float | None = None


@dataclass(frozen=True, kw_only=True)
class Saved(SavedItself, Reported):
    """the script has saved its state in `file` and called `requeue(saved=file)`. With `clusterddp.continue_epoch()`
    also the `items` of its epoch that it had trained on, and when the file was `written`"""

    items: int | None = None

    def sentence(self) -> str:
        after = "" if self.items is None else f" after {counted(self.items, 'batch', 'batches')} of its epoch"
        return f"the script saved {self.file}{after}"


@dataclass(frozen=True, kw_only=True)
class NoSave(Reported):
    """the script has called `requeue(saved=file)`, but rank 0 sees no such file or folder"""

    file: str

    def sentence(self) -> str:
        return (
            f"requeue(saved={self.file!r}): there is no such file or folder. The next attempt continues without it. "
            "Pass the path that the script saved to"
        )


@dataclass(frozen=True, kw_only=True)
class OwnCheckpoint(SavedItself):
    """the script has written a complete checkpoint in its own format"""

    written: float = field()


@dataclass(frozen=True, kw_only=True)
class OwnCheckpointRejected(Event):
    """the attempt was given `file`, and the script failed before its first step. The next one gets the match before"""

    file: str
    written: float

    def sentence(self) -> str:
        return f"the script failed with {self.file} before its first step. The next attempt gets the match before it"


@dataclass(frozen=True, kw_only=True)
class NoMatch(Event):
    """the script has saved `file`, and no file matches `patterns`"""

    file: str
    patterns: Sequence[str]

    def sentence(self) -> str:
        return (
            f"the script has saved {self.file}, but no file matches {' or '.join(self.patterns)} so far. If the script "
            "can resume from that file, correct `resume.checkpoint` and submit with --change"
        )
