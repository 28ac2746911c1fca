"""Steps and what the script does in them."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clusterddp.history.event import Event, Reported
from clusterddp.reporter import counted, duration

#: The same, of a process that a rank has started and the supervisor.
NO_RANK = (
    "clusterddp.stop_requested() is always False in a process that a rank has started. Let clusterddp start one rank "
    "per GPU (--gpus) instead of starting processes in the script (torch.multiprocessing.spawn)"
)
#: What to do about ranks that train apart.
CHECK_SCRIPT = "Check the script's options for distributed training"


@dataclass(frozen=True, kw_only=True)
class Progress(Reported):
    """a loop to `steps` begins, or has just ended, at `step`"""

    step: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class StepsSeen(Reported):
    """rank 0 has completed its first step, of unknown number, in a script without clusterddp. `out` and `err`: the
    sizes of its output files in bytes"""

    out: int | None = None
    err: int | None = None


@dataclass(frozen=True, kw_only=True)
class ChildStep(Event):
    """a process that the script has started with multiprocessing has made a step, of unknown number"""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


@dataclass(frozen=True, kw_only=True)
class ChildDied(Reported):
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


@dataclass(frozen=True, kw_only=True)
class Apart(Reported):
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


@dataclass(frozen=True, kw_only=True)
class NoRank(Event):
    """a process that a rank has started calls `clusterddp.stop_requested()`, which is False there"""

    def sentence(self) -> str:
        return NO_RANK


@dataclass(frozen=True, kw_only=True)
class MicrobatchingSkipped(Reported):
    """more samples per rank than batch_size, without `run.micro()`"""

    step: int
    samples: int
    most: int

    def sentence(self) -> str:
        return (
            f"each rank takes {self.samples} samples at once, more than its batch_size of {self.most}, because the "
            "script does not call run.micro(). If this runs out of memory, loop over run.micro(batch)"
        )


@dataclass(frozen=True, kw_only=True)
class WaitsForData(Reported):
    """rank 0 spends `percent` % of its time waiting for batches. Recorded once"""

    step: int
    percent: int
    advice: str

    def sentence(self) -> str:
        advice = f"{self.advice[:1].upper()}{self.advice[1:]}"
        return f"rank 0 spent {self.percent}% of its recent steps waiting for data. {advice}"


@dataclass(frozen=True, kw_only=True)
class Stalled(Reported):
    """until now, rank 0 has waited in one step for `seconds`, far longer than a step takes, for its batch or for other
    ranks"""

    seconds: float

    def sentence(self) -> str:
        return (
            f"rank 0 waited for {duration(self.seconds)} in one step, for its batch or for other ranks. Training "
            "continues. Check the network and the file system"
        )


@dataclass(frozen=True, kw_only=True)
class DeviceMemory(Reported):
    """the most GPU memory that rank 0's allocator has reserved, after its first step"""

    bytes: int


@dataclass(frozen=True, kw_only=True)
class NotFinite(Reported):
    """metrics became NaN or infinite"""

    step: int
    metrics: Mapping[str, str]
    count: int

    def sentence(self) -> str:
        (metric, value), *others = self.metrics.items()
        more = max(len(others), self.count - 1)
        also = f", and {counted(more, 'other metric')} became NaN or infinite" if more else ""
        return f"{metric} became {value} at step {self.step}{also}. Training continues"


@dataclass(frozen=True, kw_only=True)
class Explained(Reported, abstract=True):
    """What the script does is likely a mistake, in words."""

    step: int
    explanation: str

    def sentence(self) -> str:
        return self.explanation


@dataclass(frozen=True, kw_only=True)
class UnevenCalls(Explained):
    """some ranks call `run.every()` more often than others. Recorded once"""


@dataclass(frozen=True, kw_only=True)
class ShortEpochs(Explained):
    """a step takes more samples than the dataset has, so an epoch is less than a step"""


@dataclass(frozen=True, kw_only=True)
class NotGiven(Explained):
    """the script steps an optimizer or a scheduler that `ctx.run()` did not receive"""


@dataclass(frozen=True, kw_only=True)
class ShapesChanged(Explained):
    """`torch.compile` has seen changing shapes. Recorded once"""


@dataclass(frozen=True, kw_only=True)
class GroupAdded(Explained):
    """an optimizer has received a further group of parameters after `ctx.run()`"""


@dataclass(frozen=True, kw_only=True)
class Diverged(Explained):
    """the state differs between ranks"""

    parts: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Tracker(Reported):
    """a tracker does not get all values. Training continues"""

    tracker: str
    problem: str

    def sentence(self) -> str:
        return f"{self.tracker} {self.problem}"


@dataclass(frozen=True, kw_only=True)
class Evaluated(Reported):
    """rank 0 has spent `seconds` in evaluations since the last such event"""

    seconds: float


@dataclass(frozen=True, kw_only=True)
class Result(Reported):
    """`run.log()` outside a step. The logged values are further fields"""

    step: int
