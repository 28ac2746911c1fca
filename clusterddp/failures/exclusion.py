"""Which failed nodes the next jobs of a run exclude, and a message for their administrator. Pure functions.

Slurm chooses a job's nodes and keeps them as long as the job runs. Nodes that fail the run repeatedly are excluded from
its next jobs with ``sbatch --exclude``: few of them, for a day, and only if enough other nodes remain. Nodes that
``nodelist`` names are not, because Slurm refuses a job that requires and excludes the same node.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from clusterddp.errors import LauncherEnvironmentError
from clusterddp.hostlist import expand
from clusterddp.jobdef.job import Job
from clusterddp.reporter import counted, one_line

Event = Mapping[str, Any]

#: After this many failures within FOR_S seconds a node is excluded for FOR_S seconds; at most MOST nodes at a time.
FAILURES, MOST, FOR_S = 2, 2, 24 * 3600.0


@dataclass(frozen=True)
class Choice:
    """The nodes to exclude from the next job, those of them that are new, and why others are not excluded."""

    nodes: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    refused: str | None = None


def choose(events: Iterable[Event], lost: Sequence[str], usable: Sequence[str], job: Job, now: float) -> Choice:
    """Which nodes the next job excludes.

    ``lost``: nodes that do not respond now, with precedence if not all can be excluded. ``usable``: the nodes that
    Slurm could allocate to the job. If fewer than it needs would remain, none is added, and those excluded before are
    not either, if too few remain without them.
    """
    events, needed = list(events), job.least_allocated
    before = may_exclude(job, left_out(events, now))
    new = [node for node in failed(events, now) if node not in before]
    failing = [node for node in dict.fromkeys([*lost, *new]) if node not in before]
    fresh = may_exclude(job, failing)
    room = max(0, MOST - len(excluded(events, now)))
    nodes, over = [*before, *fresh[:room]], fresh[room:]
    left = set(usable) - set(nodes)
    if nodes and len(left) < needed:
        remain = counted(len(left), "usable node")
        reason = f"without {' and '.join(nodes)} the partition has {remain}, but the run needs {needed}"
        if len(set(usable) - set(before)) >= needed:
            return Choice(tuple(before), refused=reason)
        return Choice(refused=f"{reason}. The next job excludes no node" if before else reason)
    reasons = [f"{' and '.join(over)} failed, but at most {MOST} failed nodes are excluded at a time"] if over else []
    if required := [node for node in failing if node not in fresh]:
        reasons.append(f"nodelist requires {' and '.join(required)}")
    return Choice(tuple(nodes), tuple(node for node in new if node in nodes), ", and ".join(reasons) or None)


def may_exclude(job: Job, nodes: Iterable[str]) -> list[str]:
    """Those of the nodes that the run's next jobs may exclude: not those of ``nodelist``, if it names no file."""
    required: list[str] = []
    with suppress(LauncherEnvironmentError):
        required = expand(job.nodelist or "")
    return [node for node in nodes if node not in required]


def failures(events: Iterable[Event], node: str, now: float) -> list[Event]:
    """A node's failures: a rank on it failed first, other than by an error of the script, its GPU hung, or the node was
    lost."""
    return [event for event in events if is_failure(event) and event["suspect"] == node and event["time"] > now - FOR_S]


def is_failure(event: Event) -> bool:
    """Whether the event is a failure of a node."""
    return bool(event.get("suspect")) and event["event"] in ("rank_failed", "hung", "node_lost")


def failed(events: Iterable[Event], now: float) -> list[str]:
    """The nodes that failed often enough to be excluded, or that lack GPUs.

    Each failure of a node cancels the same failure of another one, because a script fails on any node.
    """
    events = list(events)
    by_node = {
        node: failures(events, node, now)
        for node in dict.fromkeys(event["suspect"] for event in events if event.get("suspect"))
    }
    kinds = {node: Counter(map(kind, found)) for node, found in by_node.items()}
    total = sum(kinds.values(), Counter[str | None]())
    return [node for node, found in by_node.items() if _unusable(found, total - kinds[node])]


def _unusable(failed: Sequence[Event], elsewhere: Counter[str | None]) -> bool:
    left, alone = elsewhere.copy(), set()
    for event in failed:
        if (same := kind(event)) is not None and left[same] > 0:
            left[same] -= 1
        else:
            alone.add(event["attempt"])
    return len(alone) >= FAILURES or any(event.get("lacks_gpus") for event in failed)


def kind(event: Event) -> str | None:
    """Equal for failures that a script may cause on any node: the error without its numbers. None if the node itself
    has failed: it was lost, its GPU's driver reported a fault, or it lacks GPUs."""
    if event["event"] == "node_lost" or event.get("fault") or event.get("lacks_gpus"):
        return None
    return event["event"] if event["event"] == "hung" else re.sub(r"\d+", "0", what(event))


def excluded(events: Iterable[Event], now: float) -> list[str]:
    """The nodes that are excluded now because they failed."""
    return _named(events, ("excluded",), now)


def left_out(events: Iterable[Event], now: float) -> list[str]:
    """All nodes that are excluded now: those that failed, and those that the user does not want."""
    return _named(events, ("excluded", "requested"), now)


def _named(events: Iterable[Event], kinds: Sequence[str], now: float) -> list[str]:
    recent = [event for event in events if event["event"] in kinds and event["time"] > now - FOR_S]
    return list(dict.fromkeys(node for event in recent for node in event.get("nodes") or ()))


def still_excluded(
    events: Iterable[Event], now: float, usable: Callable[[], Sequence[str] | None], job: Job
) -> list[str]:
    """The excluded nodes, unless fewer others are usable than the job needs, or that is unknown (None)."""
    nodes = may_exclude(job, left_out(events, now))
    found = usable() if nodes else None
    return nodes if found is not None and len(set(found) - set(nodes)) >= job.least_allocated else []


def option(given: str | None, nodes: Sequence[str]) -> list[str]:
    """sbatch's option to exclude these nodes and ``given``, those of the job definition."""
    return [f"--exclude={','.join(filter(None, [given, *nodes]))}"] if nodes else []


def letter(events: Iterable[Event], node: str, now: float) -> str:
    """A text that a user can send to the cluster's administrator."""
    events = list(events)
    jobs = {event["attempt"]: event["job"] for event in events if event["event"] == "started" and "job" in event}
    found = [(event["time"], jobs.get(event["attempt"]), what(event)) for event in failures(events, node, now)]
    words = f"caused {counted(len(found), 'failure')} in one of our training runs"
    excluded = f"Until then, our jobs exclude this node (sbatch --exclude={node})."
    return letter_about(node, words, found, [excluded])


def letter_about(
    node: str, failed: str, found: Iterable[tuple[float, str | None, str]], excluded: Sequence[str]
) -> str:
    """The text, from each failure's time, job and error. ``excluded``: whether jobs exclude the node, in a sentence."""
    times = [(time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)), job, error) for at, job, error in found]
    lines = [
        f"Node {node} {failed}:",
        *(f"  {when}  job {job or 'unknown'}: {error}" for when, job, error in times),
        "Ranks on other nodes did not fail first. Could you check this node (memory, GPUs, network, disk)?",
        *excluded,
    ]
    return "\n".join(map(one_line, lines))


def what(event: Event) -> str:
    """The first line of what a node's failure was."""
    words = event.get("fault") or event.get("error") or event.get("what") or "the node stopped responding"
    return str(words).splitlines()[0]


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
