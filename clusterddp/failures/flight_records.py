"""Finds the cause of a hang in torch's Flight Recorder traces: the collective that a rank has not completed.

A collective's number counts those of its group, and is the same on all ranks, so that records can be compared: a rank
did not call a collective, called a different one, or has not completed one that others have. Pure functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clusterddp.rundir.records import is_count, is_text

#: The most process groups that a rank reports, and the most characters of a collective's sizes.
MOST_GROUPS, LONGEST_SIZES = 8, 60
#: Collectives whose inputs have the same sizes on all ranks.
_EQUAL_SIZES = ("all_reduce", "allreduce", "broadcast", "reduce")

#: A process group: its name and backend, the number of the last collective up to which all are complete, that of the
#: last one that was called, and the first that is not complete, "" if there is none.
Row = Sequence[Any]


@dataclass(frozen=True)
class Apart:
    """Ranks that differ. ``groups``: ranks, and what they did, in words. ``late``: those at fault. Empty if unknown.
    ``different``: whether they called different collectives."""

    groups: tuple[tuple[tuple[int, ...], str], ...]
    late: tuple[int, ...]
    different: bool = False


def is_outline(value: Any) -> bool:
    """Whether a value from a rank is the outline of its flight record."""
    checks = (is_text, is_count, is_count, is_text)
    return isinstance(value, list) and all(
        isinstance(row, list) and len(row) == 4 and all(map(lambda check, one: check(one), checks, row))
        for row in value
    )


def outline(record: Mapping[str, Any]) -> Sequence[Row]:
    """A row for each process group in a flight record. Raises KeyError for a record of an unknown format."""
    rows: dict[str, list[Any]] = {}
    for entry in record["entries"]:  # the oldest first
        if entry["is_p2p"]:
            continue
        backend = entry["profiling_name"].partition(":")[0]  # each of a group counts its own
        name, number = f"{entry['process_group'][0]} {backend}", entry["collective_seq_id"]
        row = rows.setdefault(name, [name, number - 1, number, ""])
        row[2] = number
        if not row[3] and _complete(entry):
            row[1] = number
        elif not row[3]:
            row[3] = _words(entry)
    return [*rows.values()][:MOST_GROUPS]


def _complete(entry: Mapping[str, Any]) -> bool:
    """NCCL's that timed out are also retired. gloo's stay "scheduled" when they are complete (torch 2.13)."""
    if entry["profiling_name"].startswith("gloo:"):
        return bool(entry["retired"])
    return bool(entry["state"] == "completed")


def _words(entry: Mapping[str, Any]) -> str:
    name: str = entry["profiling_name"]
    if name.partition(":")[2] not in _EQUAL_SIZES:
        return name
    sizes = ", ".join("x".join(map(str, size)) or "1" for size in entry["input_sizes"])
    return f"{name} of {sizes[:LONGEST_SIZES]}"


def compare(outlines: Mapping[int, Sequence[Row]]) -> Apart | None:
    """The first difference between ranks, by the group's name. None if there is none."""
    by_group: dict[str, dict[int, Row]] = {}
    for rank, rows in sorted(outlines.items()):
        for row in rows:
            by_group.setdefault(row[0], {})[rank] = row
    found = [apart for _, rows in sorted(by_group.items()) if (apart := _compare_group(rows)) is not None]
    return min(found, key=lambda apart: not apart.different, default=None)


def _compare_group(rows: Mapping[int, Row]) -> Apart | None:
    waiting = {rank: row for rank, row in rows.items() if row[3]}
    if not waiting:
        return None
    first = min(row[1] for row in waiting.values()) + 1
    at_first = {rank: row[3] for rank, row in waiting.items() if row[1] + 1 == first}
    number = f"collective {first} of their group"
    if len(set(at_first.values())) > 1:
        groups = [
            (tuple(rank for rank, words in at_first.items() if words == one), f"called {one}")
            for one, _ in sorted(Counter(at_first.values()).items(), key=lambda item: item[1])
        ]
        few = tuple(rank for ranks, _ in groups[:-1] for rank in ranks)
        late = few if len(few) < len(groups[-1][0]) else ()
        return Apart(tuple((ranks, f"{words} as {number}") for ranks, words in groups), late, different=True)
    words = next(iter(at_first.values()))
    if absent := tuple(rank for rank, row in rows.items() if row[2] < first):
        return Apart(((absent, f"did not call {words}, {number}"),), absent)
    if len(at_first) < len(rows):
        behind = tuple(at_first)
        return Apart(((behind, f"did not complete {words}, {number}, unlike the others"),), behind)
    return None
