"""Which failed nodes the next jobs of a run exclude, and a message for their administrator. Pure functions.

Slurm chooses a job's nodes and keeps them as long as the job runs. Nodes that fail the run repeatedly are excluded from
its next jobs with ``sbatch --exclude``: few of them, for a day, and only if enough other nodes remain. Nodes that
``nodelist`` names are not, because Slurm refuses a job that requires and excludes the same node.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from clusterddp.errors import LauncherEnvironmentError
from clusterddp.history.beginnings import Preflight, Started
from clusterddp.history.event import Event
from clusterddp.history.failures import Excluded, Hung, LaunchFailed, NodeFailure, NodeLost, RankFailed
from clusterddp.history.stops import Requested
from clusterddp.history.view import Events
from clusterddp.hostlist import expand
from clusterddp.jobdef.job import Job
from clusterddp.reporter import counted, one_line

#: After this many failures within FOR_S seconds a node is excluded for FOR_S seconds; at most MOST nodes at a time.
FAILURES, MOST, FOR_S = 2, 2, 24 * 3600.0


@dataclass(frozen=True)
class Choice:
    """The nodes to exclude from the next job, those of them that are new, and why others are not excluded."""

    nodes: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    refused: str | None = None


def choose(history: Events, lost: Sequence[str], usable: Sequence[str], job: Job, now: float) -> Choice:
    """Which nodes the next job excludes.

    ``lost``: nodes that do not respond now, with precedence if not all can be excluded. ``usable``: the nodes that
    Slurm could allocate to the job. If fewer than it needs would remain, none is added, and those excluded before are
    not either, if too few remain without them.
    """
    needed, before = job.least_allocated, may_exclude(job, left_out(history, now))
    new = [node for node in failed(history, now) if node not in before]
    failing = [node for node in dict.fromkeys([*lost, *new]) if node not in before]
    fresh = may_exclude(job, failing)
    room = max(0, MOST - len(excluded(history, now)))
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


def of_nodes(events: Iterable[Event]) -> list[NodeFailure]:
    """The failures of nodes: a rank on one failed first, other than by an error of the script, its GPU hung, the node
    was lost, or its setup failed."""
    return [event for event in events if isinstance(event, NodeFailure) and event.suspect]


def failures(history: Events, node: str, now: float) -> list[NodeFailure]:
    """A node's failures of the last day."""
    return [event for event in of_nodes(history) if event.suspect == node and event.time > now - FOR_S]


def failed(history: Events, now: float) -> list[str]:
    """The nodes that failed often enough to be excluded, or that lack GPUs or a network.

    Each failure of a node cancels the same failure of another one, because a script fails on any node.
    """
    suspects = dict.fromkeys(event.suspect for event in of_nodes(history) if event.suspect)
    by_node = {node: failures(history, node, now) for node in suspects}
    kinds = {node: Counter(map(kind, found)) for node, found in by_node.items()}
    total = sum(kinds.values(), Counter[str | None]())
    return [node for node, found in by_node.items() if _unusable(found, total - kinds[node])]


def _unusable(failed: Sequence[NodeFailure], elsewhere: Counter[str | None]) -> bool:
    left, alone = elsewhere.copy(), set()
    for event in failed:
        if (same := kind(event)) is not None and left[same] > 0:
            left[same] -= 1
        else:
            alone.add(event.attempt)
    return len(alone) >= FAILURES or any(map(_unfit, failed))


def _unfit(failure: NodeFailure) -> bool:
    """Whether the node lacks what every attempt needs."""
    if isinstance(failure, RankFailed):
        return bool(failure.lacks_gpus or failure.lacks_interface)
    return isinstance(failure, LaunchFailed) and bool(failure.lacks_interface)


def kind(failure: NodeFailure) -> str | None:
    """Equal for failures that a script may cause on any node: the error without its numbers. None if the node itself
    has failed: it was lost, its GPU's driver reported a fault, or it lacks GPUs or a network."""
    if isinstance(failure, Hung):
        return failure.name
    if isinstance(failure, NodeLost) or _unfit(failure) or (isinstance(failure, RankFailed) and failure.fault):
        return None
    return re.sub(r"\d+", "0", what(failure))


def excluded(history: Events, now: float) -> list[str]:
    """The nodes that are excluded now because they failed."""
    return _unique(history.all(Excluded), now)


def left_out(history: Events, now: float) -> list[str]:
    """All nodes that are excluded now: those that failed, and those that the user does not want."""
    return _unique([event for event in history if isinstance(event, (Excluded, Requested))], now)


def _unique(events: Iterable[Excluded | Requested], now: float) -> list[str]:
    return list(dict.fromkeys(node for event in events if event.time > now - FOR_S for node in event.nodes))


def still_excluded(history: Events, now: float, usable: Callable[[], Sequence[str] | None], job: Job) -> list[str]:
    """The excluded nodes, unless fewer others are usable than the job needs, or that is unknown (None)."""
    nodes = may_exclude(job, left_out(history, now))
    found = usable() if nodes else None
    return nodes if found is not None and len(set(found) - set(nodes)) >= job.least_allocated else []


def option(given: str | None, nodes: Sequence[str]) -> list[str]:
    """sbatch's option to exclude these nodes and ``given``, those of the job definition."""
    return [f"--exclude={','.join(filter(None, [given, *nodes]))}"] if nodes else []


def letter(history: Events, node: str, now: float) -> str:
    """A text that a user can send to the cluster's administrator."""
    jobs = {event.attempt: event.job for event in history.all(Started)}
    found = [(event.time, jobs.get(event.attempt), what(event)) for event in failures(history, node, now)]
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


def what(failure: NodeFailure) -> str:
    """The first line of what a node's failure was."""
    words = ""
    if isinstance(failure, RankFailed):
        words = failure.fault or failure.error
    elif isinstance(failure, LaunchFailed):
        words = failure.error
    elif isinstance(failure, Hung):
        words = failure.what
    return (words or "the node stopped responding").splitlines()[0]


def unchecked(history: Events, nodes: Sequence[str]) -> list[str]:
    """The nodes that have not passed a preflight of this run, or failed since they did."""
    passed: set[str] = set()
    started: dict[int, list[str]] = {}
    for event in history:
        if isinstance(event, Started):
            with suppress(LauncherEnvironmentError):
                started[event.attempt] = expand(event.nodes)
        elif isinstance(event, Preflight):
            passed.update(started.get(event.attempt, ()))
        elif isinstance(event, NodeFailure) and event.suspect:
            passed.discard(event.suspect)
    return [node for node in nodes if node not in passed]
