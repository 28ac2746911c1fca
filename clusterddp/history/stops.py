"""Stops: signals, users' requests, and how the ranks agree on a last step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clusterddp.history.event import Event, Reported

#: The sentence of an event that both the rank and the supervisor print.
HANDLER_REPLACED = (
    "the script replaced the {signal} handler of clusterddp.init() with {handler}. If that handler exits or raises, "
    "the steps since the last checkpoint are repeated. Remove it, because clusterddp saves and stops the run"
)


@dataclass(frozen=True, kw_only=True)
class HandlerReplaced(Reported):
    """the script replaced a signal handler of clusterddp"""

    signal: str
    handler: str

    def sentence(self) -> str:
        return HANDLER_REPLACED.format(signal=self.signal, handler=self.handler)


@dataclass(frozen=True, kw_only=True)
class Signal(Reported):
    """a stop signal reached the rank"""

    signal: str


@dataclass(frozen=True, kw_only=True)
class Notified(Reported):
    """the supervisor's request to stop reached the rank"""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Notice(Event):
    """the supervisor asks the ranks to stop"""

    why: str

    def sentence(self) -> str:
        return f"{self.why}. Asking the ranks to stop"


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
class Overdue(Reported):
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


@dataclass(frozen=True, kw_only=True)
class Stopping(Reported):
    """all ranks stop after `step`"""

    step: int
    reason: str

    def sentence(self) -> str:
        return f"stop requested ({self.reason}). All ranks stop after step {self.step}"


@dataclass(frozen=True, kw_only=True)
class Finishing(Reported):
    """all steps are done. The last checkpoint is being saved"""

    step: int


@dataclass(frozen=True, kw_only=True)
class LeftLoop(Reported):
    """the script left its loop, with a `break` or an `exception`"""

    step: int
    steps: int
    by: str = ""

    def sentence(self) -> str:
        ways = {"break": "break or return", "exception": "an exception"}
        advice = "" if self.by == "exception" else ". To end a run early, call run.finish(), which saves"
        return (
            f"the script left its loop with {ways.get(self.by, 'break or an exception')} after step {self.step} of "
            f"{self.steps}. Steps since the newest checkpoint are not saved{advice}"
        )
