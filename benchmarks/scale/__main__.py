"""What grows with the number of ranks: ``python -m benchmarks.scale`` (``make bench-scale``), 15 to 20 minutes.

The parts: simulated ranks against a real supervisor, counts and their exponents, host lists, ``list``, a real Slurm of
64 nodes, real gloo ranks. Each part's figures are kept in ``build/scale`` until the page is written, so that a call
that was interrupted continues with the parts that it lacks. ``--parts`` measures some again, and takes the others from
the page's JSON file. ``--quick`` is without Slurm and gloo, and smaller.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.scale import commands, connections, exponents
from benchmarks.scale.page import table_rows, tables

SIZES, QUICK_SIZES = (1024, 4096, 16384), (1024, 4096)
BARE = 4096
#: How often a failure is to be named for each number of ranks.
FAILURES, QUICK_FAILURES = 3, 1
#: What has been measured so far by a call that is to measure all parts.
STATE = Path("build") / "scale"


def simulated(quick: bool) -> dict[str, Any]:
    """Each number of ranks once, failures more often; the join of 4,096 also beside the least server, alternating."""
    sizes, failures = (QUICK_SIZES, QUICK_FAILURES) if quick else (SIZES, FAILURES)
    pairs = [connections.join_pair(BARE) for _ in range(2 if quick else 5)]
    failed = {str(ranks): connections.failures(ranks, failures) for ranks in sizes}
    return {"sizes": [connections.measure(ranks) for ranks in sizes], "pairs": pairs, "failures": failed}


def slurm(_: bool) -> dict[str, Any]:
    from benchmarks.scale import cluster

    return cluster.measure()


def gloo(_: bool) -> dict[str, Any]:
    from benchmarks.scale import gloo

    return gloo.measure()


def counted(_: bool) -> list[dict[str, Any]]:
    from benchmarks.scale import counted

    return counted.measure()


PARTS: Mapping[str, Callable[[bool], Any]] = {
    "connections": simulated,
    "exponents": lambda quick: exponents.measure((8, 32) if quick else exponents.SIZES),
    "counted": counted,
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
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    arguments = parser.parse_args()
    if arguments.quick or arguments.parts:
        names = report.named("part", arguments.parts, PARTS) if arguments.parts else list(QUICK_PARTS)
        file = arguments.out / "scale.json"
        found = json.loads(file.read_text())["parts"] if arguments.parts and file.exists() else {}
        found |= {name: measured(name, arguments.quick) for name in names}
        write(arguments.out, found)
        return
    STATE.mkdir(parents=True, exist_ok=True)
    for name in PARTS:
        if not kept(name).exists():
            part = measured(name, False)
            kept(name).with_suffix(".new").write_text(json.dumps(part))
            kept(name).with_suffix(".new").rename(kept(name))
    write(arguments.out, {name: json.loads(kept(name).read_text()) for name in PARTS})
    for name in PARTS:
        kept(name).unlink()


def kept(name: str) -> Path:
    return STATE / f"{name}.json"


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


def write(folder: Path, found: Mapping[str, Any]) -> None:
    gathered = {name: found[name] for name in PARTS if name in found}
    table = [row.as_json() for row in table_rows({name: part["found"] for name, part in gathered.items()})]
    text = """# What grows with the number of ranks

Simulated ranks are connections that speak the real protocol, many in one process; they train nothing, and share this
machine with the supervisor.
[Thousands of ranks](../../docs/design/rendezvous.md#thousands-of-ranks) says what follows."""
    report.write(folder, "scale", text, {"rows": table, "parts": gathered}, tables=tables(gathered))


if __name__ == "__main__":
    main()
