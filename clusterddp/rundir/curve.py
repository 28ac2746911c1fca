"""A metric over a whole run, from few parts of metrics.jsonl, so that ``--watch`` can read it every few seconds."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from clusterddp.rundir import records
from clusterddp.rundir.files import open_binary
from clusterddp.rundir.records import is_count

#: Bytes read at each place of a large file, and the most values taken from there.
_BLOCK, _VALUES = 1 << 13, 8

Point = tuple[int, float]


def curve(path: Path, name: str, places: int, events: Iterable[Mapping[str, Any]] = ()) -> list[Point]:
    """Steps and values of a metric, from equally distant ``places`` of the file and both of its ends.

    Lines that a later attempt discarded, according to the history, are left out. Empty if the file cannot be read.
    """
    counting = records.counts({event["attempt"]: event["step"] for event in events if _begins(event)})
    points: dict[int, float] = {}
    for text in _lines(path, json.dumps(name).encode(), places):
        line = records.parse(text, records.METRICS)[0]
        if line is None or not counting(line):
            continue
        value = records.with_floats(line).get(name)
        if isinstance(value, (int, float)):
            points[line["step"]] = float(value)
    return sorted(points.items())


def main_metric(values: Mapping[str, Any]) -> str | None:
    """The metric that is shown if none is named: ``loss``, else one with that in its name, else the first."""
    names = [name for name in values if name not in records.NOT_METRICS]
    losses = [name for name in names if "loss" in name.lower()]
    return "loss" if "loss" in names else next(iter([*losses, *names]), None)


def _begins(event: Mapping[str, Any]) -> bool:
    return event["event"] in ("training", "resumed") and is_count(event.get("step"))


def _lines(path: Path, key: bytes, places: int) -> Iterator[bytes]:
    """Complete lines that contain ``key``: a few of each place, the first and the last of the file among them."""
    try:
        with open_binary(path, buffered=False) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= places * _BLOCK:
                yield from _few(file.read().split(b"\n")[:-1], key, places * _VALUES)
                return
            for place in range(places):
                begin = place * (size - _BLOCK) // (places - 1)
                file.seek(begin)
                lines = file.read(_BLOCK).split(b"\n")
                yield from _few(lines[begin > 0 : -1], key, _VALUES)
    except OSError:  # not there yet, or another user's
        return


def _few(lines: list[bytes], key: bytes, most: int) -> list[bytes]:
    """At most ``most`` lines with the key, the first and the last among them."""
    found = [line for line in lines if key in line]
    if len(found) <= most:
        return found
    return [found[index * (len(found) - 1) // (most - 1)] for index in range(most)]
