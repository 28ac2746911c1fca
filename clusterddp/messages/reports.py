"""What ranks report to their supervisor, besides the events of a history that ranks report (``history/``).

On the control channel a report is a line with ``event``, the name of its class in snake case, and its fields that
differ from their defaults. ``supervisor/control_server.py`` reads it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from clusterddp import codec
from clusterddp.codec import Count, Seconds, Time
from clusterddp.history.event import Reported

#: A process group: its name and backend, the number of the last collective up to which all are complete, that of the
#: last one that was called, and the first that is not complete, "" if there is none.
Row: TypeAlias = tuple[str, Count, Count, str]
#: Steps, then the seconds of each phase of ``rundir/timing.PHASES``, None where unknown.
Totals: TypeAlias = tuple[Count, Time | None, Time | None, Time | None, Time | None]
#: Those of ``rundir/timing.GPU_FIGURES``, None where unknown.
Figures: TypeAlias = tuple[Time | None, Time | None, Time | None, Time | None, Time | None, Time | None]


class End(enum.Enum):
    """How a rank ended. The value is the word in its record."""

    DONE = "done"
    #: By a stop of clusterddp.
    STOPPED = "stopped"
    #: With exit code 0, and with steps left.
    UNFINISHED = "unfinished"
    #: With another exit code.
    EXIT = "exit"
    EXCEPTION = "exception"
    #: It never reached the supervisor.
    LOST = "lost"
    #: A callable's ``checkpoint()`` returned None.
    DECLINED = "declined"
    #: It was asked to exit, as another rank was lost.
    DISMISSED = "dismissed"
    #: A newer attempt exists.
    SUPERSEDED = "superseded"

    # Those of ranks without a record, which the supervisor finds out.

    #: It was killed by a signal, or called os._exit.
    DIED = "died"
    #: It exited with code 0 while others waited for it.
    EARLY = "early"
    #: Its node does not respond.
    SILENT = "silent"
    #: Its connection fell silent, but its node responds.
    UNREACHABLE = "unreachable"
    #: All ranks had to be ended, and may restart, or must not.
    HUNG = "hung"
    HUNG_FOR_GOOD = "hung for good"
    #: srun has started no rank, and may start them the next time, or would refuse again.
    UNLAUNCHED = "unlaunched"
    REFUSED = "refused"

    @property
    def well(self) -> bool:
        """Whether the rank finished or stopped."""
        return self in (End.DONE, End.STOPPED)

    @property
    def hung(self) -> bool:
        """Whether it was at fault for a hang."""
        return self in (End.HUNG, End.HUNG_FOR_GOOD)

    @property
    def of_launcher(self) -> bool:
        """Whether no rank was started, so that this is no rank's failure, and no node's."""
        return self in (End.UNLAUNCHED, End.REFUSED)


@dataclass(frozen=True)
class Hello:
    """The first message of a rank's connection. ``port``: rank 0's, of its store. ``process``: the same if the rank
    connects again."""

    rank: int
    host: str
    pid: int
    port: int | None = None
    process: str | None = None


@dataclass(frozen=True)
class Joined:
    """The rank has connected. Made by the supervisor from its first message."""

    host: str


@dataclass(frozen=True)
class Serving:
    """Rank 0's store accepts connections."""


@dataclass(frozen=True)
class Alive:
    """The rank's heartbeat.

    ``count``: the boundaries it has reached. ``step``: the steps it has completed, from the attempt's beginning if
    there is ``made``. ``age_s``: since its last boundary. ``allowed_s``: the timeout to the next one. None before
    training, infinity while the watchdog is suspended. ``own_s``, ``step_s``: its compute time in a step, and the whole
    step. ``timing``: the steps timed ``timing_age_s`` ago, and the seconds of each phase in them. ``stood_s``: seconds
    for which the rank was stopped since its last heartbeat.

    While it makes no progress, ``place`` is where its main thread is, for ``still_s``. ``waits``: whether it waits
    there for other ranks. ``line``: of the script, then. After a timeout also ``device``: its step, its state there and
    for how many seconds, and the ``collectives`` of its flight record.
    """

    count: Count
    step: Count
    age_s: Seconds
    allowed_s: Seconds | None = None
    own_s: Seconds | None = None
    step_s: Seconds | None = None
    timing: Totals | None = None
    timing_age_s: Time = 0.0
    made: Count | None = None
    stood_s: Time = 0.0
    place: str = ""
    waits: bool = False
    line: str = ""
    still_s: Seconds = math.inf
    device: tuple[Count, str, Seconds] | None = None
    collectives: Sequence[Row] = ()


@dataclass(frozen=True)
class Gpu:
    """What the rank's GPUs did since the last such report."""

    figures: Figures


@dataclass(frozen=True)
class Connecting:
    """The rank has called ``clusterddp.init()``, and connects to the other ranks."""


@dataclass(frozen=True)
class Connected:
    """The rank has connected to the other ranks."""


@dataclass(frozen=True)
class Wrote:
    """The script's first save in this folder of a file with such a suffix."""

    file: str


@dataclass(frozen=True)
class Thread:
    """A thread of a rank, and its frames, the innermost first."""

    name: str
    frames: Sequence[str]


@dataclass(frozen=True)
class Stacks:
    """A rank's stacks, for a request. ``place``: where its main thread is."""

    request: Count
    place: str
    threads: Sequence[Thread]


@dataclass(frozen=True)
class Saving:
    """Rank 0 will save, for a request. Without ``step``, it has no run to save. ``committed``: its newest
    checkpoint."""

    request: Count
    step: Count | None = None
    committed: Count | None = None


@dataclass(frozen=True)
class Committing:
    """Rank 0 has a snapshot of this step, and asks whether every rank has made the step."""

    question: Count
    step: Count


@dataclass(frozen=True)
class Made:
    """How many steps the rank has made, for such a question."""

    question: Count
    step: Count


@dataclass(frozen=True)
class Left:
    """How the rank ended: its last report, and its record in the run directory.

    ``error``: an exception's type and message. ``exception``: its type.
    ``reason``: of a stop. ``exit_code``: only after ``sys.exit``.
    ``alone``: rank 0 stopped without the others. ``left_loop``: it is done with steps left, as after ``break``.
    ``read_saved``: it is done without a step, after it had opened what the script saved at its last stop.
    ``without_torch``: the script did not import torch, so that no steps could be seen. ``final``: a restart would raise
    the exception again, as of a checkpoint that does not fit. ``lacks_gpus``: its node has fewer GPUs than its ranks
    need. ``lacks_interface``: its node has none of the interfaces in ``interface``.
    """

    host: str
    end: End
    error: str = ""
    exception: str = ""
    traceback: str = ""
    step: Count | None = None
    reason: str = ""
    exit_code: int | None = None
    used_clusterddp: bool = False
    alone: bool = False
    left_loop: bool = False
    read_saved: bool = False
    without_torch: bool = False
    final: bool = False
    lacks_gpus: bool = False
    lacks_interface: bool = False


Report: TypeAlias = (
    Serving | Alive | Gpu | Connecting | Connected | Wrote | Stacks | Saving | Committing | Made | Left | Reported
)
#: What ranks report besides events of the history, by its name on the control channel.
REPORTS: Mapping[str, type[Any]] = {name: kind for name, kind in codec.by_name(Report).items() if kind is not Reported}


def report_line(report: Report) -> dict[str, Any]:
    """A report as an object for the control channel, or an event for a line of the history, as far as a rank knows."""
    values = codec.written(report)
    return {"event": codec.name_of(type(report)), **values.pop("others", {}), **values}


def record_of(left: Left, rank: int) -> dict[str, Any]:
    """The object for a rank's record in the run directory."""
    return {"rank": rank, **codec.written(left), "end": left.end.value}
