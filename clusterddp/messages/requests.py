"""What a user asks of the supervisor of a run, and its answers.

A request is the first and only message of a connection: a line with the token, ``request``, the name of its class in
snake case, and its fields as ``values``. The answers are lines with ``answer``, the name of the class, and its fields:
any number of ``News``, and one of the others as the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from clusterddp import codec
from clusterddp.codec import Count
from clusterddp.messages.reports import Thread


@dataclass(frozen=True)
class Stacks:
    """The stacks of these ranks' threads, such as 0,3-5. None: of all ranks."""

    ranks: str | None = None


@dataclass(frozen=True)
class Save:
    """Save at the next step boundary."""


@dataclass(frozen=True)
class Stop:
    """Save, stop, and hold the run until it is submitted again."""


@dataclass(frozen=True)
class Requeue:
    """Save, stop, and requeue, or continue in a new job without ``nodes`` if there are any."""

    nodes: Sequence[str] = ()


@dataclass(frozen=True)
class Drain:
    """Save, stop, and continue in the same job without this node."""

    node: str


@dataclass(frozen=True)
class Child:
    """From a process that a rank has started: it has called ``stop_requested()``. There is no answer."""


UserRequest: TypeAlias = Stacks | Save | Stop | Requeue | Drain | Child
#: The requests by their names.
REQUESTS: Mapping[str, type[Any]] = codec.by_name(UserRequest)


def request_line(request: UserRequest) -> dict[str, Any]:
    """A request as an object for the connection, without the token."""
    return {"request": codec.name_of(type(request)), "values": vars(request)}


def read_request(line: Mapping[str, Any]) -> UserRequest:
    """The request in an object from a connection. Raises Misfit."""
    values = line.get("values") or {}
    if not isinstance(values, dict):
        raise codec.Misfit(f"'values' is {values!r:.60}")
    request: UserRequest = codec.read_one(REQUESTS, "request", {**values, "request": line.get("request")})
    return request


@dataclass(frozen=True)
class News:
    """A sentence for the waiting user. Others follow."""

    text: str


@dataclass(frozen=True)
class Refused:
    """Why the request was refused."""

    why: str


@dataclass(frozen=True)
class Committed:
    """The checkpoint of this step is committed."""

    step: Count


@dataclass(frozen=True)
class Ended:
    """All ranks have exited. The history will have the end of the attempt."""


@dataclass(frozen=True)
class StackGroup:
    """Ranks with equal stacks. ``place``: where their main threads are."""

    ranks: Sequence[int]
    hosts: Sequence[str | None]
    place: str
    threads: Sequence[Thread]


@dataclass(frozen=True)
class RankStacks:
    """The stacks, the largest group of ranks first, the ranks without an answer, and the hosts of the unanswered."""

    stacks: Sequence[StackGroup] = ()
    unanswered: Sequence[int] = ()
    starting: Sequence[int] = ()
    exited: Sequence[int] = ()
    hosts: Mapping[str, str] = field(default_factory=dict)


LastAnswer: TypeAlias = Refused | Committed | Ended | RankStacks
_ANSWERS: Mapping[str, type[Any]] = codec.by_name(News | LastAnswer)


def answer_line(answer: News | LastAnswer) -> dict[str, Any]:
    """An answer as an object for the connection."""
    return {"answer": codec.name_of(type(answer)), **codec.written(answer)}


def read_answer(line: Any) -> News | LastAnswer:
    """The answer in an object from the connection. Raises Misfit."""
    answer: News | LastAnswer = codec.read_one(_ANSWERS, "answer", line)
    return answer
