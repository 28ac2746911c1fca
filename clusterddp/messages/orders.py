"""What a supervisor asks of its ranks.

On the control channel an order is a line with ``order``, the name of its class in snake case, and its fields. Ranks
import this module, so that it stays small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from clusterddp import codec
from clusterddp.codec import Count


@dataclass(frozen=True)
class Connect:
    """Rank 0's store accepts connections."""


@dataclass(frozen=True)
class Stop:
    """Stop at a step boundary."""

    reason: str


@dataclass(frozen=True)
class Explain:
    """Report what may make this rank slow. ``ratio``: to the others, and for how many ``seconds``."""

    ratio: float
    seconds: float


@dataclass(frozen=True)
class RecordFlight:
    """Write torch's Flight Recorder trace of the last collectives. ``what``: the hang."""

    what: str


@dataclass(frozen=True)
class WriteStacks:
    """Write the stacks of all threads to the rank's log. ``seconds``: for how long it has waited."""

    seconds: float


@dataclass(frozen=True)
class SendStacks:
    """Report the stacks of all threads, for a request."""

    request: Count


@dataclass(frozen=True)
class Save:
    """Rank 0: save at the next step boundary, for a request."""

    request: Count


@dataclass(frozen=True)
class CountSteps:
    """Report how many steps the rank has made, for rank 0's question before a commit."""

    question: Count


@dataclass(frozen=True)
class Commit:
    """Rank 0: commit the checkpoint of the question, or why not, if a rank is lost."""

    question: Count
    why_not: str | None = None


@dataclass(frozen=True)
class Leave:
    """Exit now."""

    why: str


Order: TypeAlias = (
    Connect | Stop | Explain | RecordFlight | WriteStacks | SendStacks | Save | CountSteps | Commit | Leave
)
_ORDERS: Mapping[str, type[Any]] = codec.by_name(Order)


def order_line(order: Order) -> dict[str, Any]:
    """An order as an object for the control channel."""
    return {"order": codec.name_of(type(order)), **vars(order)}


def read_order(line: Any) -> Order:
    """The order in an object from the control channel. Raises Misfit."""
    order: Order = codec.read_one(_ORDERS, "order", line)
    return order
