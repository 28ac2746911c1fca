"""What grows with the number of ranks: ``python -m benchmarks.scale`` (``make bench-scale``), 10 to 15 minutes.

The parts: simulated ranks against a real supervisor, counts and their exponents, host lists, ``list``, a real Slurm of
64 nodes, 32 real gloo ranks. ``--parts`` measures some of them again, and keeps the others' figures. ``--quick`` is
without the last two, and smaller.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import report, rows
from benchmarks.scale import commands, connections, exponents
from benchmarks.scale.page import page, table_rows

SIZES, QUICK_SIZES = (1024, 4096, 16384), (1024, 4096)
BARE = 4096


def simulated(quick: bool) -> dict[str, Any]:
    """Each number of ranks once; the join of 4,096 also beside the least server, alternating."""
    pairs = [connections.join_pair(BARE) for _ in range(2 if quick else 5)]
    return {"sizes": [connections.measure(ranks) for ranks in (QUICK_SIZES if quick else SIZES)], "pairs": pairs}


def slurm(_: bool) -> dict[str, Any]:
    from benchmarks.scale import cluster

    return cluster.measure()


def gloo(_: bool) -> dict[str, Any]:
    from benchmarks.scale import gloo

    return gloo.measure()


PARTS: Mapping[str, Callable[[bool], Any]] = {
    "connections": simulated,
    "exponents": lambda quick: exponents.measure((8, 32) if quick else exponents.SIZES),
    "hosts": lambda _: commands.host_lists(),
    "list": lambda quick: commands.listing(*(((200, 800), 2) if quick else ((1000, 10_000), 3))),
    "slurm": slurm,
    "gloo": gloo,
}
QUICK_PARTS = ("connections", "exponents", "hosts", "list")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="at most 2 minutes, without Slurm and gloo")
    parser.add_argument("--parts", default="", help=f"of {', '.join(PARTS)}; the others' figures are kept")
    parser.add_argument("--out", type=Path, default=Path("docs/measurements"))
    arguments = parser.parse_args()
    file = arguments.out / "scale.json"
    kept = json.loads(file.read_text())["parts"] if arguments.parts and file.exists() else {}
    names = arguments.parts.split(",") if arguments.parts else QUICK_PARTS if arguments.quick else PARTS
    found = dict(kept)
    for name in names:
        found[name] = {"date": time.strftime("%Y-%m-%d"), "found": PARTS[name](arguments.quick)}
        write(arguments.out, found)  # what has been measured so far


def write(folder: Path, found: Mapping[str, Any]) -> None:
    gathered = {name: found[name] for name in PARTS if name in found}
    table = [row.as_json() for row in table_rows({name: part["found"] for name, part in gathered.items()})]
    report.write(folder, "scale", page(gathered, rows.table(table)), {"rows": table, "parts": gathered})


if __name__ == "__main__":
    main()
