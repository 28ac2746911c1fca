"""The results of ``benchmarks.scale``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks import report, rows

#: Bars: the supervisor's CPU seconds until 4,096 ranks have joined, seconds until a failure is named, milliseconds to
#: read a rank's environment.
JOIN_S, NAMED_S, HOSTS_MS = 10.0, 1.0, 10.0
BAR_RANKS = 4096


def table_rows(parts: Mapping[str, Any]) -> list[rows.Row]:
    """Of the common table."""
    found = []
    if "connections" in parts:
        pairs, name = parts["connections"]["pairs"], f"{BAR_RANKS:,} simulated ranks join"
        limit = "a server that only accepts, parses and answers"
        found.append(rows.paired(name, "CPU s", pairs["ours"], pairs["least"], limit, most=JOIN_S))
        named = max(failure["named_s"] for failure in parts["connections"]["failures"][str(BAR_RANKS)])
        found.append(rows.counted(f"a killed rank of {BAR_RANKS:,} is named", "s", named, NAMED_S, "1 s", allowed=1.0))
    for form in parts.get("hosts", []):
        name, limit = f"rank environment, 16,384 nodes: {form['form']}", "making as many names"
        found.append(rows.paired(name, "CPU ms", form["read_ms"], form["least_ms"], limit, most=HOSTS_MS))
    for folder in parts.get("list", []):
        name = f"list of {folder['runs']:,} runs"
        found.append(rows.paired(name, "CPU s", folder["ours_s"], folder["least_s"], "reading the same files"))
    if "slurm" in parts:  # one run: no interval
        slurm = parts["slurm"]
        control, limit = slurm["controls"]["imports"], "srun with as many tasks that only import a rank's modules"
        for what, seconds in {"start": slurm["start"], "are restarted in place": slurm["failure"]["again"]}.items():
            name = f"Slurm: {slurm['ranks']} ranks {what}"
            found.append(rows.counted(name, "s", seconds["all_s"], control, limit))
    return found


def tables(parts: Mapping[str, Any]) -> dict[str, str]:
    """What has no limit, of those parts that were measured, by heading."""
    made = {}
    if "connections" in parts:
        sizes = {f"{size['ranks']:,} ranks": flat(size) for size in parts["connections"]["sizes"]}
        made["Simulated ranks"] = beside(sizes)
    if "exponents" in parts:
        lines = [[row["mechanism"], *row["counts"].values(), row["exponent"]] for row in parts["exponents"]]
        head = [
            "messages, lines or operations",
            *(f"N = {size}" for size in parts["exponents"][0]["counts"]),
            "exponent",
        ]
        made["Counts"] = report.table(head, lines)
    for name, heading in {"slurm": "A real Slurm", "gloo": "Real gloo ranks, preempted once"}.items():
        if name in parts:
            made[heading] = beside({"seconds or number": flat(parts[name])})
    return made


def flat(figures: Mapping[str, Any], above: str = "") -> dict[str, object]:
    """The figures of nested mappings by their names in a row; what was counted of each message is left out."""
    found: dict[str, object] = {}
    for name, value in figures.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{above}{name}: ") if name != "counts" else {}
        else:
            found[f"{above}{name}"] = value
    return found


def beside(columns: Mapping[str, Mapping[str, object]]) -> str:
    """A table of the same figures of several things."""
    names = dict.fromkeys(name for column in columns.values() for name in column)
    return report.table(
        ["", *columns], [[name, *(column.get(name, "-") for column in columns.values())] for name in names]
    )
