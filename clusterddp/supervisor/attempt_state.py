"""The state of an attempt while its ranks run, the events that change it and the actions that follow.

``decide.py`` and ``user_requests.py`` decide what follows from which event. All values are immutable.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from clusterddp import protocol
from clusterddp.failures.hangs import Hang, StillSlow
from clusterddp.failures.placement import Placement
from clusterddp.history.beginnings import Allocated
from clusterddp.history.event import Event as HistoryEvent
from clusterddp.history.failures import Slow, StragglerRecovered
from clusterddp.jobdef.job import Job
from clusterddp.messages import reports
from clusterddp.messages.orders import Order
from clusterddp.messages.reports import Alive, Figures, Joined, Left, Saving, Stacks
from clusterddp.messages.requests import LastAnswer, News, UserRequest

#: How often the controller is asked, in seconds, while something may be happening to the job.
ASK_S = 4.0
#: After how many seconds a question about silent nodes or the ranks' step is repeated that got no answer: twice as long
#: each time, because a controller that is overloaded serves many jobs.
ASK_AGAIN_S = (2.0, 20.0)
#: For how long a fault of a GPU may be the cause of a failure, in seconds: a collective may hang until its timeout.
FAULT_S = 1800.0


# --- events


class Stop(enum.Enum):
    """Why ranks are asked to stop. The value is the word for it in messages and in the history."""

    PREEMPTION = "preemption"
    TIME_LIMIT = protocol.TIME_LIMIT
    JOB_END = "end of the job"
    INTERRUPTION = "interruption"
    HOLD = protocol.HOLD
    REQUEUE = protocol.REQUEUE
    DRAIN = protocol.DRAIN
    GPU_HOURS = protocol.GPU_HOURS


#: A reason for which ranks stop without being asked: a signal, before its meaning is known.
SIGNAL = "signal"


@dataclass(frozen=True)
class Notice:
    """When a job ends: ``end_time`` in unix seconds (None: no time limit), and why it must stop now, if it must.

    ``allocated``: when it was submitted, could start and started. None if unknown. ``nodes``: those of a job that
    outlives its nodes. None if unknown.
    """

    end_time: float | None
    stop: Stop | None = None
    allocated: Allocated | None = None
    nodes: frozenset[str] | None = None

    @property
    def limit_s(self) -> float | None:
        """The time limit that Slurm gave the job, in seconds. None if unknown."""
        return None if self.end_time is None or self.allocated is None else self.end_time - self.allocated.begun


#: What a rank reports over the control channel, or the server about its connection. Events are recorded in the history.
Report = reports.Report | Joined | HistoryEvent


@dataclass(frozen=True)
class RankEvent:
    """A rank has sent a report."""

    rank: int
    report: Report


@dataclass(frozen=True)
class ConnectionLost:
    """The connection to a rank broke. ``silent``: the rank did not close it. Its node stopped answering."""

    rank: int
    silent: bool = False


@dataclass(frozen=True)
class ControllerFailed:
    """The controller gave no answer, or an error (``reachable``). ``missing``: Slurm's commands are not installed."""

    error: str
    reachable: bool = False
    missing: bool = False


@dataclass(frozen=True)
class SilentNodes:
    """Which slurmds of the silent nodes ``asked`` do not answer. None: the controller has not told their addresses."""

    asked: tuple[str, ...]
    dead: tuple[str, ...] | None


@dataclass(frozen=True)
class TermNotice:
    """On this cluster, ranks are killed this many seconds after a TERM."""

    seconds: float


@dataclass(frozen=True)
class RankFailed:
    """The launcher has seen a rank's process fail."""

    rank: int


@dataclass(frozen=True)
class StepWaits:
    """Whether srun still waits for nodes of the job, so that no rank is started. None: Slurm has not said so."""

    waits: bool | None


@dataclass(frozen=True)
class Superseded:
    """A newer attempt of the run exists."""


@dataclass(frozen=True)
class RunRemoved:
    """The run directory was removed, renamed or replaced: ``why``, as a sentence."""

    why: str


@dataclass(frozen=True)
class RanksExited:
    """All ranks have exited. ``exit_code`` is the launcher's."""

    exit_code: int


@dataclass(frozen=True)
class Request:
    """The user has sent a request over the connection ``client``."""

    client: int
    what: UserRequest


class Timer(enum.Enum):
    """A timer. As an event, it has expired."""

    STOP_CHECK = "compare the time limit with the clock"
    WATCHDOG = "look for hung and slow ranks"
    DISMISS = "ask the peers of a failed rank to exit"
    KILL = "kill hung ranks, and the peers of a failed one"
    UNKILLABLE = "stop waiting for ranks that outlive a KILL"
    ASK = "ask the controller again while a node is silent"
    ABANDON = "stop waiting for the launcher"
    CONNECT = "look for ranks that do not connect to the others"
    STEP = "ask whether the ranks' step exists"
    ANSWER = "answer requests whose ranks have had enough time"


Event = (
    RankEvent
    | ConnectionLost
    | Notice
    | ControllerFailed
    | SilentNodes
    | TermNotice
    | RankFailed
    | StepWaits
    | Superseded
    | RunRemoved
    | RanksExited
    | Request
    | Timer
    | Hang
    | Slow
    | StillSlow
    | StragglerRecovered
)

# --- actions


@dataclass(frozen=True)
class Record:
    """Append an event to the run's history."""

    event: HistoryEvent


@dataclass(frozen=True)
class Say:
    """Print a line."""

    text: str


@dataclass(frozen=True)
class Broadcast:
    """Send an order to these ranks (None: all)."""

    order: Order
    ranks: frozenset[int] | None = None


@dataclass(frozen=True)
class Answer:
    """Answer the request of ``client``. After ``News``, others follow."""

    client: int
    answer: News | LastAnswer


@dataclass(frozen=True)
class StartTimer:
    """Start a timer, or restart it."""

    timer: Timer
    seconds: float


@dataclass(frozen=True)
class Heartbeat:
    """Pass a rank's heartbeat to the watchdog."""

    rank: int
    host: str
    beat: Alive


@dataclass(frozen=True)
class GpuFigures:
    """What a rank's GPUs did, for the file of step times."""

    rank: int
    figures: Figures


class Do(enum.Enum):
    """The actions without arguments."""

    ASK_CONTROLLER = "ask the controller now, and often for a while"
    ASK_AGAIN = "ask the controller now"
    ASK_NODES = "ask the slurmds of the silent nodes"
    ASK_STEP = "ask the controller whether the launcher still waits for nodes"
    NOTIFY_RANKS = "signal the ranks to stop"
    KILL_RANKS = "kill the ranks"
    ABANDON_RANKS = "stop waiting for ranks that may be unreachable"
    RUN_WATCHDOG = "look for hung and slow ranks"
    RESET_WATCHDOG = "forget all heartbeats"
    FENCE = "stop writing, and close all connections"


Action = Record | Say | Broadcast | Answer | StartTimer | Heartbeat | GpuFigures | Do
Step = tuple["State", list[Action]]


# --- state

_V = TypeVar("_V")


class PerRank(Mapping[int, _V], Generic[_V]):
    """A value per rank. Immutable: ``put`` and ``without`` return a new one, and copy only a part of this one.

    A copy of everything for each message of a rank would take time that grows with the square of their number.
    """

    #: Ranks per part: near the square root of the number of ranks, a part and the list of parts take about as long.
    _PART = 128

    def __init__(self, values: Mapping[int, _V] | None = None) -> None:
        self._parts: dict[int, dict[int, _V]] = {}
        for rank, value in (values or {}).items():
            self._parts.setdefault(rank // self._PART, {})[rank] = value
        self._length = sum(map(len, self._parts.values()))

    def put(self, rank: int, value: _V) -> PerRank[_V]:
        """With this value of a rank."""
        return self._with({**self._parts.get(rank // self._PART, {}), rank: value}, rank)

    def without(self, rank: int) -> PerRank[_V]:
        """Without the value of a rank, which may have none."""
        part = {each: value for each, value in self._parts.get(rank // self._PART, {}).items() if each != rank}
        return self._with(part, rank)

    def _with(self, part: dict[int, _V], rank: int) -> PerRank[_V]:
        made = PerRank[_V]()
        number = rank // self._PART
        made._parts = {**self._parts, number: part}
        made._length = self._length + len(part) - len(self._parts.get(number, ()))
        return made

    def __getitem__(self, rank: int) -> _V:
        return self._parts.get(rank // self._PART, {})[rank]

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and rank in self._parts.get(rank // self._PART, ())

    def __iter__(self) -> Iterator[int]:
        for part in self._parts.values():
            yield from part

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"PerRank({dict(self)})"


class NodeNames(tuple[str, ...]):
    """Names of nodes, in an order. ``in`` takes the same time for any number of them."""

    _known: frozenset[str]

    def __new__(cls, names: Iterable[str] = ()) -> NodeNames:
        made = super().__new__(cls, names)
        made._known = frozenset(made)
        return made

    def __contains__(self, name: object) -> bool:
        return name in self._known


@dataclass(frozen=True)
class Pending:
    """A request that is not answered yet."""

    request: Request
    #: The ranks that it waits for, until when (in unix seconds), and what they have answered: those that have are still
    #: among ``ranks``.
    ranks: frozenset[int] = frozenset()
    until: float = math.inf
    stacks: PerRank[Stacks] = field(default_factory=PerRank[Stacks])
    saving: Saving | None = None
    #: The different ones among the stacks.
    distinct: Mapping[Stacks, Stacks] = field(default_factory=dict)


@dataclass(frozen=True)
class Question:
    """Rank 0's question, by its number, whether every rank has made this step."""

    number: int
    step: int
    #: The ranks that have not said so yet.
    waiting: PerRank[bool]


@dataclass(frozen=True)
class State:
    """The state of an attempt. The first eight fields do not change."""

    job: Job
    #: The nodes with ranks in Slurm's order; empty where they are unknown.
    nodes: tuple[str, ...] = ()
    #: How many steps the run had made before.
    steps_before: int = 0
    #: Grace period for reachable ranks to exit before the supervisor stops waiting for the launcher.
    abandon_s: float = 0.0
    #: Whether the controller can start the run again.
    restartable: bool = True
    #: The nodes of the job in groups.
    placement: Placement = field(default_factory=Placement)
    #: How many steps of unknown number are repeated at least if the script begins again.
    made_before: int = 0

    #: When the GPU hours that the run may use are used up, in unix seconds.
    gpu_hours_end: float = math.inf
    hosts: PerRank[str] = field(default_factory=PerRank[str])
    #: The ranks that have called ``clusterddp.init()``, and whether each has connected to the other ranks since.
    connecting: PerRank[bool] = field(default_factory=PerRank[bool])
    #: Whether all have called it that have not ended, and for how many seconds they have connected since then. Before,
    #: since the first one called it.
    all_connecting: bool = False
    connecting_s: float = 0.0
    #: When each rank's connection broke, or it reported a failure, in unix seconds.
    lost_at: PerRank[float] = field(default_factory=PerRank[float])
    #: The ranks whose connection has ended.
    closed: PerRank[bool] = field(default_factory=PerRank[bool])
    #: How each rank ended that has reported it.
    ends: PerRank[Left] = field(default_factory=PerRank[Left])
    #: The ranks whose nodes stopped answering, and those whose connection fell silent although their nodes answer.
    silent: frozenset[int] = frozenset()
    unreachable: frozenset[int] = frozenset()
    #: Whether the controller, and then the silent nodes, are being asked if it was this node that was cut off instead,
    #: and whether the controller failed to answer before.
    confirming: bool = False
    cut_off: bool = False
    #: Whether the silent nodes are being asked, or will be once ASK has expired, and how many questions about them, or
    #: about the step, have got no answer.
    nodes_asked: bool = False
    unanswered: int = 0
    #: Why to abandon the attempt as soon as rank 0 has saved; empty if there is no reason. Whether its ranks were then
    #: asked to exit, and were killed.
    abandon: str = ""
    leaving: bool = False
    killed: bool = False
    #: What rank 0 has asked before its newest commit.
    question: Question | None = None
    #: After which step ranks have left a loop before its end, as with ``break``. Another loop may have followed.
    left_loop: PerRank[int] = field(default_factory=PerRank[int])
    #: From when all ranks stop, or are done, until rank 0 has saved or is lost.
    saving: bool = False
    #: Whether rank 0 stops without the others: no step ended in time, or it has called a callable's ``checkpoint()``.
    rank_0_alone: bool = False
    #: The reasons to stop that the ranks were sent, and those that one has confirmed: values of Stop, or SIGNAL.
    stops_sent: frozenset[str] = frozenset()
    heard: frozenset[str] = frozenset()
    #: When the last was sent, in unix seconds, and how long after a TERM ranks are killed; None if unknown.
    sent_at: float = 0.0
    term_notice_s: float | None = None
    #: The controller's last answer, and why it was time to stop at the last look.
    notice: Notice = field(default_factory=lambda: Notice(None))
    due: Stop | None = None
    #: Whether the controller has reported that the job is being preempted.
    preempted: bool = False
    #: Whether the history has the times of the job's allocation.
    allocated: bool = False
    controller_away: bool = False
    controller_missing: bool = False
    #: Whether the newest training loop has steps left; None if none has begun.
    unfinished: bool | None = None
    last_save_s: float = 0.0
    #: Why all ranks must exit because one has; empty if none has. Whether that one failed.
    dismissal: str = ""
    failed: bool = False
    #: How many events of each kind ranks other than 0 have reported.
    reported: Mapping[str, int] = field(default_factory=dict)
    #: The first fault of the hardware that each rank has reported of its GPUs, and when, in unix seconds.
    gpu_faults: PerRank[tuple[float, str]] = field(default_factory=PerRank[tuple[float, str]])
    #: For how many seconds in a row ranks were stopped, at most: suspended with their job, or by a signal. Since when
    #: ranks run again, in unix seconds.
    stood_s: float = 0.0
    running_since: float = 0.0
    #: Whether heartbeats count: a lost rank, or node, is no hang.
    watched: bool = True
    hang: Hang | None = None
    hung_at: float = 0.0
    #: The requests of the user that are not answered yet, by connection.
    pending: Mapping[int, Pending] = field(default_factory=dict)
    #: Whether the user has asked the run to stop (Stop.HOLD), to be requeued, or to leave the node ``drained``.
    wanted: Stop | None = None
    drained: str = ""
    #: Whether the launcher was ended because nodes of the job stayed busy, so that no rank could start.
    busy: bool = False
    superseded: bool = False
    #: Whether the run directory was removed: the attempt ends, and has no place to record that.
    removed: bool = False
    exit_code: int | None = None

    @property
    def stop_margin_s(self) -> float:
        """How many seconds before the time limit to stop: as requested, more if saves are slow, less if the limit is
        short, as with ``time_min``. A save may take three times as long as the last one on a shared disk."""
        wanted = max(self.job.timeouts.notice_s, 10.0 + 3.0 * self.last_save_s)
        limits = [limit for limit in (self.job.time_s, self.notice.limit_s) if limit is not None]
        return min([wanted, *(limit / 4 for limit in limits)])

    @property
    def notice_ends(self) -> float:
        """When the ranks' grace period ends, in unix seconds. A stop that the user requested has no deadline: it counts
        as one before the time limit."""
        by_signal = self.notice.stop is not None and self.term_notice_s is not None
        notice_s = self.term_notice_s if by_signal else self.stop_margin_s
        return min(self.sent_at + (notice_s or 0.0), self.notice.end_time or math.inf)

    @property
    def given_up(self) -> bool:
        """Whether rank 0 has stopped without the others, which do not save."""
        return self.rank_0_alone and 0 in self.lost_at

    @property
    def ask_again_s(self) -> float:
        """How long until a question that got no answer is repeated, in seconds."""
        return min(ASK_AGAIN_S[0] * 2.0 ** min(self.unanswered, 10), ASK_AGAIN_S[1])

    @property
    def lost_nodes(self) -> tuple[str, ...]:
        """The nodes that were lost with their ranks."""
        return tuple(dict.fromkeys(self.node_of(rank) for rank in sorted(self.silent)))

    @property
    def ended_well(self) -> set[int]:
        """The ranks that finished or stopped."""
        return {rank for rank, left in self.ends.items() if left.end.well}

    def left_loop_at(self, rank: int, otherwise: int) -> int:
        """The steps that a rank made which is done with steps left. ``otherwise`` of a rank that has none left."""
        left = self.ends.get(rank)
        return self.left_loop.get(rank, otherwise) if left is not None and left.left_loop else otherwise

    def gpu_fault_of(self, rank: int, at: float) -> str:
        """The fault of a rank's GPU that may be why the rank failed at ``at``. Empty if there is none."""
        time, fault = self.gpu_faults.get(rank, (-math.inf, ""))
        return fault if at - time <= FAULT_S else ""

    def node_of(self, rank: int) -> str:
        """The node of a rank: its host where Slurm uses that name, else the node that the launcher puts the rank on."""
        host, index = self.hosts.get(rank, "unknown"), rank // self.job.ranks_per_node
        return self.nodes[index] if host not in self.nodes and index < len(self.nodes) else host
