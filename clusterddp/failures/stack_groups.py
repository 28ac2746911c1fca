"""The stacks of many ranks, grouped by equal ones, and in words.

A rank's stacks are ``worker/stacks.py``'s: "place" (where its main thread is) and "threads", each with "name" and
"frames", the most recent call first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from clusterddp.hostlist import ranges
from clusterddp.reporter import counted
from clusterddp.rundir.records import is_text

#: The most ranks, or hosts, that a line names.
NAMED = 8
_FIELDS = {"name", "frames"}


def is_threads(value: Any) -> bool:
    """Whether a value from a rank is a list of threads with their frames."""
    return isinstance(value, list) and all(
        isinstance(thread, dict)
        and thread.keys() == _FIELDS
        and is_text(thread["name"])
        and isinstance(thread["frames"], list)
        and all(map(is_text, thread["frames"]))
        for thread in value
    )


def stacks_key(said: Mapping[str, Any]) -> Any:
    """Equal for ranks with equal stacks."""
    return said["place"], tuple((thread["name"], *thread["frames"]) for thread in said["threads"])


def grouped(stacks: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str]) -> list[dict[str, Any]]:
    """Ranks with equal stacks together, the largest group first: "ranks", "hosts", "place" and "threads"."""
    groups: dict[Any, dict[str, Any]] = {}
    keys: dict[int, Any] = {}  # by the identity of values, which thousands of ranks share
    of: dict[Any, dict[str | None, None]] = {}  # the hosts of each group
    for rank, said in sorted(stacks.items(), key=lambda item: item[0]):
        if (key := keys.get(id(said))) is None:
            key = keys[id(said)] = stacks_key(said)
        group = groups.setdefault(key, {"ranks": [], "hosts": [], "place": said["place"], "threads": said["threads"]})
        group["ranks"].append(rank)
        of.setdefault(key, {})[hosts.get(rank)] = None
    for key, group in groups.items():
        group["hosts"] = list(of[key])
    return sorted(groups.values(), key=lambda group: (-len(group["ranks"]), group["ranks"]))


def summary(groups: Iterable[Mapping[str, Any]]) -> str:
    """``510 ranks in the all_reduce of backward, 2 in data.py:88 (read)``: where the main threads are."""
    places: Counter[str] = Counter()
    for group in groups:
        places[group["place"]] += len(group["ranks"])
    parts = [f"{number} in {place}" for place, number in places.most_common()]
    if parts:
        place, number = places.most_common(1)[0]
        parts[0] = f"{counted(number, 'rank')} in {place}"
    return ", ".join(parts) or "no rank has answered"


def described(group: Mapping[str, Any]) -> Iterator[str]:
    """The lines about one group: its ranks and hosts, and the stacks of its threads."""
    ranks, hosts = group["ranks"], group["hosts"]
    where = ", ".join(map(str, hosts)) if len(hosts) <= NAMED else f"{len(hosts)} nodes"
    yield f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)} ({where}) in {group['place']}"
    for thread in group["threads"]:
        yield f"  {thread['name']}, most recent call first"
        yield from (f"    {frame}" for frame in thread["frames"])
