"""What a supervisor takes for many ranks: ``python -m benchmarks.scale``, about 2 minutes.

Simulated ranks (``stubs.py``) join one real supervisor on the same machine, send heartbeats and stacks, are killed,
restarted and stopped. They do not train. ``--quick`` is the smaller number of ranks alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import common
from benchmarks.scale import connections
from tests.markdown import table

#: Numbers of ranks; the rows are of the first.
SIZES = (512, 4096)
#: How often a failure is to be named.
FAILURES, QUICK_FAILURES = 3, 1
#: Bars: the supervisor's CPU seconds until all ranks have joined, and seconds until a failure is named.
JOIN_S, NAMED_S = 1.25, 1.0
TEXT = """# What a supervisor takes for many ranks

Simulated ranks are connections that speak the real protocol to one supervisor on the same machine.
They do not train."""


def measure(quick: bool) -> common.Found:
    """Each number of ranks once, failures more often."""
    sizes = SIZES[:1] if quick else SIZES
    found = [connections.measure(ranks) for ranks in sizes]
    failures = connections.failures(SIZES[0], QUICK_FAILURES if quick else FAILURES)
    figures = {"sizes": found, "failures": failures}
    return common.Found(figures, table_rows(found[0], failures), tables={"All figures": beside(found)})


def table_rows(smallest: Mapping[str, Any], failures: Sequence[Mapping[str, Any]]) -> list[common.Row]:
    """Of the common table."""
    ranks = f"{smallest['ranks']:,} simulated ranks"
    joined, named = smallest["hello"]["cpu_s"], max(failure["named_s"] for failure in failures)
    return [
        common.counted(f"{ranks} join", "CPU s", joined, JOIN_S, "the bar", allowed=1.0),
        common.counted(f"a killed one of {ranks} is named", "s", named, NAMED_S, "the bar", allowed=1.0),
    ]


def beside(sizes: Sequence[Mapping[str, Any]]) -> str:
    """A table of the same figures for several numbers of ranks."""
    columns = {f"{size['ranks']:,} ranks": flat(size) for size in sizes}
    names = dict.fromkeys(name for column in columns.values() for name in column)
    lines = [[name, *(column.get(name, "-") for column in columns.values())] for name in names]
    return table(["", *columns], lines)


def flat(figures: Mapping[str, Any], above: str = "") -> dict[str, object]:
    """The figures of nested mappings by their names in a row; what was counted of each message is left out."""
    found: dict[str, object] = {}
    for name, value in figures.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{above}{name}: ") if name != "counts" else {}
        else:
            found[f"{above}{name}"] = value
    return found


if __name__ == "__main__":
    common.main("scale", __doc__, TEXT, measure, "512 ranks only")
