"""What grows with the number of ranks: ``python -m benchmarks.scale`` (``make bench-scale``), 15 to 20 minutes.

The parts: simulated ranks against a real supervisor, counts and their exponents, host lists, ``list``, a real Slurm of
64 nodes, real gloo ranks. ``--parts`` measures some again, and takes the others from the results' JSON file.
``--quick`` is without Slurm and gloo, and smaller.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from benchmarks import report
from benchmarks.scale import commands, connections, exponents
from benchmarks.scale.page import BAR_RANKS, table_rows, tables

SIZES, QUICK_SIZES = (1024, 4096, 16384), (1024, 4096)
#: How often a failure is to be named for each number of ranks.
FAILURES, QUICK_FAILURES = 3, 1
TEXT = """# What grows with the number of ranks

Simulated ranks are connections that speak the real protocol to one supervisor on the same machine.
They do not train."""


def simulated(quick: bool) -> dict[str, Any]:
    """Each number of ranks once, failures more often; the join of 4,096 also beside the least server, in turns."""
    sizes, failures = (QUICK_SIZES, QUICK_FAILURES) if quick else (SIZES, FAILURES)
    return {
        "sizes": [connections.measure(ranks) for ranks in sizes],
        "pairs": connections.join_pairs(BAR_RANKS, 2 if quick else 5),
        "failures": {str(ranks): connections.failures(ranks, failures) for ranks in sizes},
    }


def in_module(name: str) -> Callable[[bool], Any]:
    """Of a part that needs what others do without."""
    return lambda _: import_module(f"benchmarks.scale.{name}").measure()


PARTS: Mapping[str, Callable[[bool], Any]] = {
    "connections": simulated,
    "exponents": lambda quick: exponents.measure((8, 32) if quick else exponents.SIZES),
    "hosts": lambda _: commands.host_lists(),
    "list": lambda quick: commands.listing(*(((200, 800), 2) if quick else ((1000, 10_000), 3))),
    "slurm": in_module("cluster"),
    "gloo": in_module("gloo"),
}
QUICK_PARTS = ("connections", "exponents", "hosts", "list")


def measure(quick: bool, parts: str | None) -> report.Found:
    file = report.RESULTS / "scale.json"
    names = report.named("part", parts, PARTS) if parts else QUICK_PARTS if quick else tuple(PARTS)
    found = json.loads(file.read_text())["parts"] if parts and file.exists() else {}
    found |= {name: measured(name, quick) for name in names}
    gathered = {name: found[name] for name in PARTS if name in found}
    figures = {name: part["found"] for name, part in gathered.items()}
    return report.Found({"parts": gathered}, table_rows(figures), tables=tables(figures))


def measured(name: str, quick: bool) -> dict[str, Any]:
    """A part's figures, when they were taken, how long that took and what else the machine did."""
    began, load = time.time(), os.getloadavg()[0]
    report.say(name)
    found = PARTS[name](quick)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(time.time() - began),
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
        "found": found,
    }


if __name__ == "__main__":
    report.main(
        *("scale", __doc__, TEXT, measure, "at most 2 minutes, without Slurm and gloo"),
        parts={"help": f"of {', '.join(PARTS)}; the others' figures are kept"},
    )
