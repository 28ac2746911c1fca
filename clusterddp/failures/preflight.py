"""Which nodes a run has yet to check before it trains on them (``preflight: true``). Pure functions of its history."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from clusterddp.errors import LauncherEnvironmentError
from clusterddp.hostlist import expand


def unchecked(events: Iterable[Mapping[str, Any]], nodes: Sequence[str]) -> list[str]:
    """The nodes that have not passed a preflight of this run, or failed since they did."""
    passed: set[str] = set()
    started: dict[int, list[str]] = {}
    for event in events:
        if event["event"] == "started":
            with suppress(LauncherEnvironmentError):
                started[event["attempt"]] = expand(event.get("nodes", ""))
        elif event["event"] == "preflight":
            passed.update(started.get(event["attempt"], ()))
        elif event.get("suspect"):
            passed.discard(event["suspect"])
    return [node for node in nodes if node not in passed]
