"""The cluster's controller, slow and hung ranks, nodes, and failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from clusterddp.history.event import Event, Reported
from clusterddp.history.words import at_step
from clusterddp.reporter import counted, duration


def gpu_fault(host: str, what: str, gpu: int | None, xid: int | None) -> str:
    """``Xid 79 on n3 GPU 5: the GPU has fallen off the bus``."""
    place = host if gpu is None else f"{host} GPU {gpu}"
    return f"{'a fault' if xid is None else f'Xid {xid}'} on {place}: {what}"


@dataclass(frozen=True, kw_only=True)
class ControllerAway(Event):
    """Slurm's controller is unreachable. Training continues"""

    error: str

    def sentence(self) -> str:
        return f"Slurm's controller is unreachable, but training continues: {self.error}"


@dataclass(frozen=True, kw_only=True)
class ControllerBack(Event):
    """Slurm's controller is reachable again"""

    def sentence(self) -> str:
        return "Slurm's controller is reachable again"


@dataclass(frozen=True, kw_only=True)
class ControllerMissing(Event):
    """Slurm's commands are not installed here"""

    error: str

    def sentence(self) -> str:
        return (
            f"{self.error}. The ranks stop only when they receive a signal, and the cause of a stop will be unknown. "
            "Add Slurm's commands to PATH with `setup` in the job definition"
        )


@dataclass(frozen=True, kw_only=True)
class Suspended(Event):
    """until now, a rank's process was stopped for `seconds`, and the others waited for it"""

    rank: int = field()
    host: str
    seconds: float

    def sentence(self) -> str:
        return (
            f"rank {self.rank} ({self.host}) was stopped for {duration(self.seconds)}. Its job was suspended, or its "
            "node was frozen"
        )


@dataclass(frozen=True, kw_only=True)
class Slow(Event):
    """a straggler"""

    rank: int = field()
    host: str
    own_s: float
    ratio: float

    def sentence(self) -> str:
        return (
            f"rank {self.rank} ({self.host}) is slow. It computes for {self.own_s:.3g} s per step, "
            f"{self.ratio:.1f} times the others' median, and they wait for it. Check its node, its CPU and its data"
        )


@dataclass(frozen=True, kw_only=True)
class SlowNode(Reported):
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


@dataclass(frozen=True, kw_only=True)
class GpuFault(Reported):
    """the driver has reported an error of a GPU of the rank, with its number in NVIDIA's list (`xid`). `hardware`: it
    counts against the node"""

    host: str
    what: str
    hardware: bool
    gpu: int | None = None
    xid: int | None = None

    def sentence(self) -> str:
        return gpu_fault(self.host, self.what, self.gpu, self.xid)


@dataclass(frozen=True, kw_only=True)
class StragglerRecovered(Event):
    """a straggler is no longer slow"""

    rank: int = field()
    host: str


@dataclass(frozen=True, kw_only=True)
class Hung(Event):
    """a hang: all ranks are being ended. `suspect`: the node whose GPU hung"""

    rank: int = field()
    late: Sequence[int]
    host: str
    seconds: float
    what: str
    step: int | None = None
    stalled_s: float | None = None
    suspect: str | None = None

    def sentence(self) -> str:
        return f"{self.what}. Terminating all ranks"


@dataclass(frozen=True, kw_only=True)
class NotConnected(Event):
    """after a minute, ranks have not connected to the others. `late`: these ranks"""

    late: Sequence[int]
    seconds: float
    what: str

    def sentence(self) -> str:
        return f"{self.what}. They may take timeouts.connect_s"


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
class LaunchFailed(Event):
    """srun has started no rank, or `node_setup` failed on a node. `lines`: what they printed. `refused`: the same would
    happen again. `suspect`: the node, if others passed. `lacks_interface`: the first node has none of the
    interfaces in `interface`"""

    error: str
    lines: Sequence[str]
    refused: bool
    suspect: str | None = None
    lacks_interface: bool | None = None

    def sentence(self) -> str:
        return self.error


@dataclass(frozen=True, kw_only=True)
class RankFailed(Event):
    """the first failure of the attempt. `raised`: its exception, line and step. `lacks_gpus`: the node has too few.
    `lacks_interface`: it has none of the interfaces in `interface`. `fault`: the fault of its GPU that caused this"""

    rank: int = field()
    host: str
    error: str
    step: int | None = None
    suspect: str | None = None
    since: float | None = None
    raised: str | None = None
    lacks_gpus: bool | None = None
    lacks_interface: bool | None = None
    fault: str | None = None

    def sentence(self) -> str:
        fault = f". {self.fault}" if self.fault else ""
        return f"first failure{at_step(self.step)}: rank {self.rank} ({self.host}) {self.error}{fault}"


#: What names the first failure of an attempt.
Failure = RankFailed | Hung | LaunchFailed
#: What may be the failure of a node: that of its rank or GPU, or its own. ``suspect`` is the node, if it is at fault.
NodeFailure = RankFailed | Hung | NodeLost | LaunchFailed


@dataclass(frozen=True, kw_only=True)
class Excluded(Event):
    """nodes that the next jobs exclude, for a day"""

    nodes: Sequence[str]
    failures: Sequence[int]

    def sentence(self) -> str:
        pairs = zip(self.nodes, self.failures, strict=True)
        failed = " and ".join(f"{node} (failed {counted(number, 'time')})" for node, number in pairs)
        return f"the next jobs of this run exclude {failed} for 24 hours"


@dataclass(frozen=True, kw_only=True)
class NotExcluded(Event):
    """a failed node is not excluded"""

    reason: str

    def sentence(self) -> str:
        return f"no further node is excluded, because {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Moved(Event):
    """the next attempt starts in the same job, but on `nodes`: it leaves the nodes `aside`, and `why`"""

    nodes: Sequence[str]
    aside: Sequence[str]
    why: str

    def sentence(self) -> str:
        return self.why
