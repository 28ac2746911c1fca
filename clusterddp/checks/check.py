"""The result of a check: what was found, whether that is a problem, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: The states of a check, the best one first.
OK, WARNING, FAILED = STATES = ("ok", "warning", "failed")


@dataclass(frozen=True)
class Check:
    """One row: ``found`` in words, ``advice`` for the user if it is not ok, and ``values``, the same as figures."""

    name: str
    state: str
    found: str
    advice: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """For output and for messages."""
        values = {"values": dict(self.values)} if self.values else {}
        return {"name": self.name, "state": self.state, "found": self.found, "advice": self.advice, **values}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Check:
        """What ``as_json`` gave. Raises KeyError for anything else."""
        state = value["state"] if value["state"] in STATES else FAILED
        found, advice = str(value["found"]), str(value.get("advice", ""))
        return cls(str(value["name"]), state, found, advice, dict(value.get("values", {})))


def ok(name: str, found: str, **values: Any) -> Check:
    """A check that found no problem."""
    return Check(name, OK, found, values=values)


def warning(name: str, found: str, advice: str, **values: Any) -> Check:
    """A check that found a possible problem."""
    return Check(name, WARNING, found, advice, values)


def failed(name: str, found: str, advice: str, **values: Any) -> Check:
    """A check that found a problem that prevents a run."""
    return Check(name, FAILED, found, advice, values)


def worst(checks: Iterable[Check]) -> str:
    """The worst state among them, or ok without checks."""
    return max((check.state for check in checks), key=STATES.index, default=OK)


def guarded(name: str, advice: str, check: Callable[[], Check]) -> Check:
    """The result of ``check``. If it raises an exception, a failed one with the exception's message."""
    try:
        return check()
    except Exception as error:
        return failed(name, " ".join(f"{type(error).__name__}: {error}".split())[:500], advice)
