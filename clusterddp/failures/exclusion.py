"""Nodes that fail a run: which of them its next jobs leave out, and what to write to their administrator. Pure.

Slurm chooses a job's nodes, and keeps them for as long as the job runs. A node that fails the run again and again is
left out of the jobs that the run goes on in, with ``sbatch --exclude``: few nodes, for a day, and only where enough
others remain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]

#: So many failures within FOR_S seconds, and a node is left out for as long; no more than MOST nodes at a time.
FAILURES, MOST, FOR_S = 2, 2, 24 * 3600.0


@dataclass(frozen=True)
class Choice:
    """The nodes to leave out of the next job, those among them that are so for the first time, and why not more."""

    nodes: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    refused: str | None = None


def choose(events: Iterable[Event], lost: Sequence[str], usable: Sequence[str], needed: int, now: float) -> Choice:
    """Which nodes the next job leaves out.

    ``lost``: nodes that do not answer just now, which come first where not all can be left out. ``usable``: the nodes
    that Slurm could give the job, of which it needs ``needed``: where leaving some out leaves too few, Slurm's own
    choice is taken.
    """
    events = list(events)
    before = excluded(events, now)
    new = [node for node in failed(events, now) if node not in before]
    fresh = [node for node in dict.fromkeys([*lost, *new]) if node not in before]
    room = max(0, MOST - len(before))
    nodes, over = [*before, *fresh[:room]], fresh[room:]
    left = set(usable) - set(nodes)
    if nodes != before and len(left) < needed:
        words = f"without {' and '.join(nodes)} the partition has {len(left)} usable nodes, and the run needs {needed}"
        return Choice(tuple(before), refused=words)
    words = f"{' and '.join(over)} failed, and {' and '.join(nodes)} are left out already; {MOST} nodes at most"
    return Choice(tuple(nodes), tuple(node for node in new if node in nodes), words if over else None)


def failures(events: Iterable[Event], node: str, now: float) -> list[Event]:
    """What a node did to the run: a rank on it was the first to fail, other than by its own code, or the node died."""
    kinds = ("rank_failed", "node_lost")
    return [
        event
        for event in events
        if event["event"] in kinds and event.get("suspect") == node and event["time"] > now - FOR_S
    ]


def failed(events: Iterable[Event], now: float) -> list[str]:
    """The nodes that failed the run often enough to be left out."""
    events = list(events)
    nodes = dict.fromkeys(event["suspect"] for event in events if event.get("suspect"))
    return [node for node in nodes if len({e["attempt"] for e in failures(events, node, now)}) >= FAILURES]


def excluded(events: Iterable[Event], now: float) -> list[str]:
    """The nodes that are left out at present."""
    recent = [event for event in events if event["event"] == "excluded" and event["time"] > now - FOR_S]
    return list(dict.fromkeys(node for event in recent for node in event["nodes"]))


def still_excluded(
    events: Iterable[Event], now: float, usable: Callable[[], Sequence[str] | None], needed: int
) -> list[str]:
    """The excluded nodes, unless fewer than ``needed`` others are usable, or that is unknown (None)."""
    nodes = excluded(events, now)
    found = usable() if nodes else None
    return nodes if found is not None and len(set(found) - set(nodes)) >= needed else []


def option(given: str | None, nodes: Sequence[str]) -> list[str]:
    """sbatch's option for a job without these nodes, and without what the job definition excludes, ``given``."""
    return [f"--exclude={','.join(filter(None, [given, *nodes]))}"] if nodes else []


def letter(events: Iterable[Event], node: str, now: float) -> str:
    """What a user can send to the cluster's administrator."""
    events = list(events)
    jobs = {event["attempt"]: event["job"] for event in events if event["event"] == "started" and "job" in event}
    lines = [_line(event, jobs.get(event["attempt"])) for event in failures(events, node, now)]
    return "\n".join(
        [
            f"Node {node} failed one of our training runs {len(lines)} times:",
            *lines,
            "The ranks on other nodes did not fail first. Could you check the node (memory, GPUs, network, disk)?",
            f"Until then our jobs leave it out (sbatch --exclude={node}).",
        ]
    )


def _line(event: Event, job: str | None) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"]))
    what = event["error"] if event["event"] == "rank_failed" else "the node stopped answering"
    return f"  {when}  job {job}: {what.splitlines()[0]}"
