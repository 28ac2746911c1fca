"""What a user asks of the supervisor of a run.

A request is the first and only message of a connection: a line with the token, ``request``, the name of its class in
snake case, and its fields as ``values``. ``protocol.ANSWERS`` lists the answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from clusterddp import codec


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
