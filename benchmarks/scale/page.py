"""The report of ``benchmarks.scale``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import report, rows
from clusterddp.jobdef.job import Watchdog
from clusterddp.training.log_reduction import period_s

#: Bars: the supervisor's CPU seconds until 4,096 ranks have joined, seconds until a failure is named, milliseconds.
JOIN_S, NAMED_S, HOSTS_MS = 10.0, 1.0, 10.0
BAR_RANKS = 4096


def table_rows(parts: Mapping[str, Any]) -> list[rows.Row]:
    """Of the common table."""
    found = []
    if "connections" in parts:
        ours, least = zip(*parts["connections"]["pairs"], strict=True)
        limit = "a server that only accepts, parses and answers"
        found.append(
            rows.paired(f"{BAR_RANKS:,} simulated ranks join", "CPU s", ours, least, limit, allowed=JOIN_S / max(least))
        )
    for form in parts.get("hosts", []):
        name, allowed = f"rank environment, 16,384 nodes: {form['form']}", HOSTS_MS / report.median(form["least_ms"])
        limit = "making as many names"
        found.append(rows.paired(name, "CPU ms", form["read_ms"], form["least_ms"], limit, allowed=allowed))
    for folder in parts.get("list", []):
        name = f"list of {folder['runs']:,} runs"
        found.append(rows.paired(name, "CPU s", folder["ours_s"], folder["least_s"], "reading the same files"))
    if "slurm" in parts:
        found += slurm_rows(parts["slurm"])
    return found


def slurm_rows(slurm: Mapping[str, Any]) -> list[rows.Row]:
    """One run: no interval."""
    control, ranks = slurm["controls"]["imports"], slurm["ranks"]
    limit = "srun with as many tasks that only import a rank's modules"
    seconds = {"start": slurm["start"]["all_s"], "are restarted in place": slurm["failure"]["again_all_s"]}
    return [rows.counted(f"Slurm: {ranks} ranks {what}", "s", value, control, limit) for what, value in seconds.items()]


def tables(parts: Mapping[str, Any]) -> dict[str, str]:
    """By heading, of those parts that were measured."""
    found = {name: part["found"] for name, part in parts.items()}
    made = {
        "When": report.table(
            ["part", "date", "seconds", "load average before and after"],
            [
                [name, part["date"], part["seconds"], " to ".join(map(str, part["load"]))]
                for name, part in parts.items()
            ],
        )
    }
    if "connections" in found:
        made["Simulated ranks"] = simulated(found["connections"])
    if "exponents" in found:
        made["Counts"] = counts_table(found["exponents"])
    if "counted" in found:
        from benchmarks.scale.counted import table

        made["Counts of real gloo ranks, by their kernel"] = counts_table(table(found["counted"]))
    if "slurm" in found:
        made["A real Slurm"] = on_slurm(found["slurm"], counts_for(found.get("exponents", []), found["slurm"]["ranks"]))
    if "gloo" in found:
        made["Real gloo ranks, preempted once"] = report.table(["", "seconds or number"], found["gloo"].items())
    return made


def simulated(part: Mapping[str, Any]) -> str:
    """Of each number of ranks."""
    sizes = part["sizes"]

    def of(name: str, get: Callable[[Mapping[str, Any]], object]) -> list[object]:
        return [name, *(get(size) for size in sizes)]

    lines = [
        of("all joined: CPU s", lambda s: s["hello"]["cpu_s"]),
        of("all joined: wall s", lambda s: s["hello"]["wall_s"]),
        of("the same while 2,000 strangers connect: CPU s", lambda s: s["storm"]["cpu_s"]),
        of("ranks' connections closed unanswered, in both", lambda s: s["hello"]["dropped"] + s["storm"]["dropped"]),
        of("supervisor's memory, MB (empty, joined, at the end)", memory),
        of("open files", lambda s: s["hello"]["files"]),
        of("heartbeats: period s", lambda s: s["heartbeats"]["period_s"]),
        of("heartbeats per second", lambda s: s["heartbeats"]["per_s"]),
        of("heartbeats: share of a core", lambda s: f"{100 * s['heartbeats']['cpu_share']:.1f}%"),
        of("stacks of all ranks: CPU s", lambda s: s["stacks"]["cpu_s"]),
        of("stacks of all ranks: ranks that answered", lambda s: s["stacks"]["answered"]),
        of(
            f"a killed rank is named after, s: median (worst; at most {NAMED_S:g})",
            lambda s: spread(failed(part, s, "named_s")),
        ),
        of("all simulated ranks had ended after, s", lambda s: spread(failed(part, s, "all_ended_s"))),
        of("a stop: CPU s", lambda s: s["stop"]["cpu_s"]),
        of("a stop: from the last rank's end to the next start, s", lambda s: s["stop"]["over_s"]),
        of("a stop: ranks that were not told", lambda s: s["stop"]["missed"]),
        of("history lines after two attempts", lambda s: s["stop"]["history_lines"]),
    ]
    return report.table(["", *(f"{size['ranks']:,} ranks" for size in sizes)], lines)


def failed(part: Mapping[str, Any], size: Mapping[str, Any], what: str) -> list[float]:
    """Seconds after a kill: in runs of their own, and in the one with all phases."""
    return [failure[what] for failure in (*part["failures"][str(size["ranks"])], size["failure"])]


def spread(seconds: list[float]) -> str:
    return f"{report.median(seconds):.2f} ({max(seconds):.2f})"


def memory(size: Mapping[str, Any]) -> str:
    return f"{size['empty_mb']:.0f}, {size['hello']['rss_mb']:.0f}, {size['stop']['rss_mb']:.0f}"


def counts_table(part: list[dict[str, Any]]) -> str:
    """A row per mechanism, with its exponent and its value for 16,384 ranks; rates go by their period instead."""
    sizes = list(part[0]["counts"])
    far = 16384
    lines: list[list[object]] = []
    for row in part:
        last, most = row["counts"][sizes[-1]], int(sizes[-1])
        exponent = f"{row['exponent']:.2f}"
        if row["mechanism"].startswith("history"):
            ahead = last  # see MOST_RECORDED of the supervisor
        elif period_of := RATES.get(row["mechanism"]):
            ahead, exponent = round(last * far / most * period_of(most) / period_of(far)), "-"
        else:
            ahead = round(last * (far / most) ** row["exponent"])
        lines.append([row["mechanism"], *row["counts"].values(), exponent, f"{ahead:,}"])
    head = ["messages, lines or operations", *(f"N = {size}" for size in sizes), "exponent", f"N = {far:,}, by the fit"]
    return report.table(head, lines)


def counts_for(part: list[dict[str, Any]], ranks: int) -> dict[str, int]:
    """The counts of each mechanism for so many ranks, where they were counted."""
    return {row["mechanism"]: row["counts"][str(ranks)] for row in part if str(ranks) in row["counts"]}


#: Periodic messages: a rank's period in seconds, as a function of the number of ranks.
RATES: Mapping[str, Callable[[int], float]] = {
    "run.log(reduce=...): messages to the store per second": period_s,
    "heartbeats, which have the steps' times, per second": Watchdog().period_s,
}


def on_slurm(slurm: Mapping[str, Any], counts: Mapping[str, int]) -> str:
    """``counts``: the messages of each mechanism for as many simulated ranks."""
    controls, failure, handover = (slurm[name] for name in ("controls", "failure", "handover"))
    joins, stacks = counts.get("hello and its answer", "-"), counts.get("stacks", "-")
    again, stops = counts.get("restart in place", "-"), counts.get("stop: orders, confirmations, ends", "-")
    timed: list[tuple[str, float, object]] = [
        ("`srun true`", controls["true"], ""),
        ("`srun python -c pass`", controls["python"], ""),
        ("srun of a rank's imports", controls["imports"], ""),
        ("start: all ranks run their script", slurm["start"]["all_s"], joins),
        ("`clusterddp stacks`, all ranks", slurm["stacks"]["seconds"], stacks),
        ("`clusterddp logs --rank all`", slurm["logs"]["seconds"], 0),
        ("a killed rank is named", failure["named_s"], slurm["ranks"]),
        ("all ranks run again in place, from the kill on", failure["all_s"], again),
        ("handover: from TERM until all ranks are told", handover["all_told_s"], ""),
        ("handover: from TERM until the job is requeued", handover["requeued_s"], stops),
        ("handover: from TERM until another job runs on all nodes", handover["nodes_free_s"], ""),
    ]
    lines = [[what, seconds, f"{seconds / controls['true']:.2f}", sent] for what, seconds, sent in timed]
    return report.table(["", "s", "times `srun true`", "messages"], lines)
