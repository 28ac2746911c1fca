"""Reports of ranks, as the supervisor reads them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from clusterddp.history.codec import encode, read
from clusterddp.history.event import Event
from clusterddp.messages.reports import Joined
from clusterddp.supervisor.attempt_state import RankEvent, Report
from clusterddp.supervisor.control_server import read_report
from tests.histories import whole

#: Fields of reports that most tests do not care about.
_FIELDS: Mapping[str, Mapping[str, Any]] = {"alive": {"count": 0, "step": 0, "age_s": 0.0}}


_read = lru_cache(4096)(read_report)


def reported(rank: int, name: str, values: Mapping[str, Any] | None = None) -> RankEvent:
    """A rank has sent a report of this name with these fields, and others that it must have."""
    fields = whole({"event": name, **_FIELDS.get(name, {}), **(values or {})})
    if name == "joined":
        return RankEvent(rank, Joined(fields["host"]))
    if name == "rejoined":  # made by the supervisor
        return RankEvent(rank, read({**fields, "time": 0.0, "attempt": 0, "rank": rank}))
    return RankEvent(rank, _read(rank, json.dumps(fields).encode()))


def beat_of(values: Mapping[str, Any]) -> Any:
    """A heartbeat."""
    return reported(0, "alive", values).report


def fields_of(report: Report) -> tuple[str, dict[str, Any]]:
    """The name of a report and its fields, without the rank."""
    if isinstance(report, Event):
        line = encode(report)
        return line["event"], {name: line[name] for name in line if name not in ("time", "attempt", "event", "rank")}
    return type(report).__name__.lower(), dataclasses.asdict(report)


def unreported(_: Any) -> None:
    """In place of a channel, where what is reported does not matter."""
