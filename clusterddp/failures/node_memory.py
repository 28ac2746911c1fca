"""What runs remember of failed nodes, and which nodes new jobs avoid because of it.

Each failure of a node is a small file in a folder beside the runs. An entry loses half of its weight per day. A node is
avoided if two different runs failed on it within a day and both entries together still weigh at least 1, but never more
than a tenth of a partition's nodes. ``clusterddp doctor --failed-nodes`` lists them.
"""

from __future__ import annotations

import grp
import os
import pwd
import re
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from clusterddp.errors import LauncherEnvironmentError, RunDirectoryError, SlurmError
from clusterddp.failures import exclusion
from clusterddp.history.event import Event
from clusterddp.hostlist import expand
from clusterddp.jobdef.job import Job
from clusterddp.reporter import counted, say
from clusterddp.rundir.files import create_common_folder, delete_own_file, exists, names_in, status, write_json
from clusterddp.rundir.records import read_json
from clusterddp.rundir.run_directory import SWEEP_FILE, RunDirectory
from clusterddp.rundir.schemas import is_text, is_time, optional

FOLDER = ".node-failures"
DAY_S = 24 * 3600.0
#: Entries that are older are deleted: they weigh less than a hundredth.
KEPT_S = 7 * DAY_S
#: How much two failures of different runs must weigh together.
LEAST_WEIGHT = 1.0
#: The largest share of a partition's nodes that is avoided.
MOST = 0.1
#: The most entries that are read, newest first.
MOST_READ = 2000

_SCHEMA = {
    "time": is_time,
    "node": is_text,
    "run": is_text,
    "job": optional(is_text),
    "what": is_text,
    "kind": optional(is_text),
}
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
#: The name of an entry. Other users may have put the folder there, with files of this user in it.
_ENTRY = re.compile(rf"(\d{{1,12}})-{_NODE.pattern}-[0-9a-f]{{8}}\.json", re.ASCII)


@dataclass(frozen=True)
class NodeFailure:
    """A failure of a node in a run. ``what`` is the event's own text, such as the error of the rank."""

    time: float
    node: str
    run: str
    job: str | None
    what: str
    kind: str | None = None
    """Equal for failures that a script may cause on any node (``exclusion.kind``)."""

    def weight(self, now: float) -> float:
        """1 when it happens, half of that a day later."""
        return float(0.5 ** (max(0.0, now - self.time) / DAY_S))


def memory_of(run: RunDirectory) -> Path:
    """The folder of a run's entries: beside the run, or beside its sweep."""
    beside = run.path.parent
    return (beside.parent if exists(beside / SWEEP_FILE) else beside) / FOLDER


def remember(run: RunDirectory, job: str | None, event: Event) -> None:
    """Writes an entry if the event is a failure of a node. An error is only printed."""
    if not (found := exclusion.of_nodes([event])):
        return
    (failure,) = found
    folder, at, node = memory_of(run), float(failure.time), failure.suspect
    value = {"time": at, "node": node, "run": str(run), "job": job, "what": exclusion.what(failure)[:300]}
    if (kind := exclusion.kind(failure)) is not None:
        value["kind"] = kind[:300]
    try:
        create_common_folder(folder)
        write_json(folder / f"{at:.0f}-{node}-{secrets.token_hex(4)}.json", value)
        _delete_old(folder, at)
    except OSError as error:
        say(f"could not record the failure of {node} in {folder}: {error.strerror}")


def _delete_old(folder: Path, now: float) -> None:
    for name in names_in(folder):
        if (match := _ENTRY.fullmatch(name)) and float(match[1]) < now - KEPT_S:
            with suppress(FileNotFoundError, PermissionError):  # deleted meanwhile, or somebody else's
                delete_own_file(folder / name)


def recall(folder: Path, shared: bool, now: float) -> list[NodeFailure]:
    """The entries of the last week, newest first.

    ``shared``: whether entries of other members of the folder's group count (``share: group``). Other users' entries
    never do. An entry that cannot be read is skipped, and so is a failure that the same run had on other nodes as well:
    its script is more likely to blame.
    """
    found = []
    try:
        names = sorted((name for name in names_in(folder) if name.endswith(".json") and name[0] != "."), reverse=True)
        group = status(folder).st_gid
    except OSError:
        return []
    for name in names[:MOST_READ]:
        with suppress(OSError, RunDirectoryError):
            path = folder / name
            if not _counts(status(path).st_uid, group if shared else None):
                continue
            value = read_json(path, _SCHEMA)
            if value and now - KEPT_S < value["time"] <= now + DAY_S and _NODE.fullmatch(value["node"]):
                found.append(NodeFailure(**{"job": None} | {key: value[key] for key in _SCHEMA if key in value}))
    nodes: dict[tuple[str, str], set[str]] = defaultdict(set)
    for failure in found:
        nodes[failure.run, failure.kind or ""].add(failure.node)
    found = [failure for failure in found if failure.kind is None or len(nodes[failure.run, failure.kind]) == 1]
    return sorted(found, key=lambda failure: failure.time, reverse=True)


def _counts(owner: int, group: int | None) -> bool:
    """Whether an entry of this owner counts: one's own, and with a group those of its members."""
    if owner == os.geteuid() or group is None:
        return owner == os.geteuid()
    try:
        user = pwd.getpwuid(owner)
        return user.pw_gid == group or user.pw_name in grp.getgrgid(group).gr_mem
    except KeyError:
        return False


def by_node(failures: Iterable[NodeFailure]) -> dict[str, list[NodeFailure]]:
    """Each node's failures, in the order given."""
    found: dict[str, list[NodeFailure]] = defaultdict(list)
    for failure in failures:
        found[failure.node].append(failure)
    return dict(found)


def weight(failures: Sequence[NodeFailure], now: float) -> float:
    """What two failures of different runs within a day of each other weigh together, at most. 0 if there are none."""
    newest_first = sorted(failures, key=lambda failure: failure.time, reverse=True)
    for at, later in enumerate(newest_first):
        earlier = next((each for each in newest_first[at:] if each.run != later.run), None)
        if earlier and later.time - earlier.time <= DAY_S:
            return later.weight(now) + earlier.weight(now)
    return 0.0


def is_avoided(failures: Sequence[NodeFailure], now: float) -> bool:
    """Whether a node with these failures is to be avoided."""
    return weight(failures, now) >= LEAST_WEIGHT


def choose(
    failures: Iterable[NodeFailure], usable: Sequence[str], excluded: Sequence[str], needed: int, now: float
) -> list[str]:
    """The nodes to avoid, worst first: at most a tenth of ``usable``, and ``needed`` others remain.

    ``usable``: the partition's working nodes. ``excluded``: those that the job excludes in any case.
    """
    weights = {node: weight(own, now) for node, own in by_node(failures).items() if is_avoided(own, now)}
    nodes = sorted((node for node in weights if node in usable and node not in excluded), key=lambda n: -weights[n])
    room = min(int(len(usable) * MOST), len(set(usable) - set(excluded)) - needed)
    return nodes[: max(0, room)]


def avoided(
    run: RunDirectory, job: Job, excluded: Sequence[str], usable: Callable[[], Sequence[str]], now: float
) -> list[str]:
    """The nodes that a new job of the run avoids besides those ``excluded``, which it names in a message.

    None of ``nodelist``, because Slurm refuses a job that requires and excludes the same node. ``usable`` asks Slurm,
    and is called only if there is a node to avoid.
    """
    if not job.node_memory:
        return []
    failures = recall(memory_of(run), job.share == "group", now)
    if not any(is_avoided(own, now) for own in by_node(failures).values()):
        return []
    try:
        given, required = [*excluded, *expand(job.exclude or "")], expand(job.nodelist or "")
        free = [failure for failure in failures if failure.node not in required]
        nodes = choose(free, usable(), given, job.least_allocated, now)
    except (SlurmError, LauncherEnvironmentError) as error:  # no answer, or `exclude` or `nodelist` names a file
        say(f"could not list the usable nodes, so recorded node failures are ignored: {error}")
        return []
    if nodes:
        them = "the node" if len(nodes) == 1 else "the nodes"
        say(
            f"The job avoids {' and '.join(nodes)} because several runs failed there in the last few days. "
            f"`clusterddp doctor --failed-nodes` shows the failures. To use {them}, add --no-node-memory"
        )
    return nodes


def left_out(run: RunDirectory, job: Job, usable: Callable[[], Sequence[str]], now: float) -> list[str]:
    """The nodes that a job of the run which a command submits excludes: those that the run has left out, and those that
    it avoids because other runs failed there. ``usable``: as of ``avoided``."""
    once = cache(usable)
    try:
        nodes = exclusion.still_excluded(run.history(), now, once, job)
    except SlurmError as error:
        say(f"could not list the usable nodes, so the next job may get nodes that failed this run: {error}")
        nodes = []
    return nodes + avoided(run, job, nodes, once, now)


#: What keeps a node from being avoided, for those who do not know its partition.
UNLESS = "unless that would exclude more than a tenth of its partition's usable nodes"


def letter(node: str, failures: Sequence[NodeFailure], now: float) -> str:
    """A text that a user can send to the cluster's administrator."""
    runs = counted(len({failure.run for failure in failures}), "of our training runs", "of our training runs")
    found = [(failure.time, failure.job, failure.what) for failure in failures]
    excluded = [f"For now, our new jobs exclude this node, {UNLESS}."] if is_avoided(failures, now) else []
    return exclusion.letter_about(node, f"caused {counted(len(failures), 'failure')} in {runs}", found, excluded)
