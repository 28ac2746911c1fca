"""The report of ``benchmarks.scale``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import report, rows
from benchmarks.scale.commands import exponent
from clusterddp.jobdef.job import Watchdog
from clusterddp.training.log.reduction import period_s

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


def page(parts: Mapping[str, Any], table: str) -> str:
    found = {name: part["found"] for name, part in parts.items()}
    dates = ", ".join(sorted({part["date"] for part in parts.values()}))
    texts = [
        "# What grows with the number of ranks",
        "Simulated ranks are connections that speak the real protocol, many in one process; they train nothing. "
        "They, the supervisor and other programs share this machine: seconds of wall time are upper bounds, CPU "
        "seconds are the supervisor's own. Nothing here was measured on thousands of nodes; "
        "[scale.md](../design/scale.md) says what follows from these figures and what is only argued.",
        f"{report.place()} Measured on {dates} by `python -m benchmarks.scale`.",
        measured_when(parts),
        table,
    ]
    sections: dict[str, Callable[[Any], str]] = {
        "connections": simulated,
        "exponents": counted,
        "counted": counted_by_kernels,
        "list": listed,
        "slurm": lambda slurm: on_slurm(slurm, counts_for(found.get("exponents", []), slurm["ranks"])),
        "gloo": with_gloo,
    }
    texts += [write(found[name]) for name, write in sections.items() if name in found]
    return "\n\n".join(texts)


def measured_when(parts: Mapping[str, Any]) -> str:
    """How long each part took, and what else the machine did."""
    lines = [
        [name, part["date"], part["seconds"], " to ".join(map(str, part["load"]))]
        for name, part in parts.items()
        if "load" in part
    ]
    return report.table(["part", "date", "seconds", "load average before and after"], lines)


def simulated(part: Mapping[str, Any]) -> str:
    sizes = part["sizes"]
    head = ["", *(f"{size['ranks']:,} ranks" for size in sizes)]

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
        of("a killed rank is named after, s: median (worst)", lambda s: spread(failed(part, s, "named_s"))),
        of("all simulated ranks had ended after, s", lambda s: spread(failed(part, s, "all_ended_s"))),
        of("a stop: CPU s", lambda s: s["stop"]["cpu_s"]),
        of("a stop: from the last rank's end to the next start, s", lambda s: s["stop"]["over_s"]),
        of("a stop: ranks that were not told", lambda s: s["stop"]["missed"]),
        of("history lines after two attempts", lambda s: s["stop"]["history_lines"]),
    ]
    bar = next(size for size in sizes if size["ranks"] == BAR_RANKS)
    samples = failed(part, bar, "named_s")
    met = bar["hello"]["cpu_s"] < JOIN_S and max(samples) < NAMED_S
    met = met and not bar["hello"]["dropped"] + bar["storm"]["dropped"]
    return f"""## Simulated ranks

{report.table(head, lines)}

A kill breaks one connection; then the launcher ends all other ranks at once, and the failure is named in the history
when all connections have ended. The bar for {BAR_RANKS:,} ranks: all joined within {JOIN_S:g} CPU s, the failure named
within {NAMED_S:g} s in each of {len(samples)} runs, no connection closed unanswered. It is {report.verdict(met)}."""


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


def counted(part: list[dict[str, Any]]) -> str:
    return f"""## Counts

{counts_table(part)}

Counted over real connections, and for the store with agreements in threads. In {exponents_steps()} steps without a
request no rank sent anything to the store or the supervisor, besides heartbeats. The history takes at most 64 events of
one kind from ranks other than 0: its lines stop growing there."""


#: Periodic messages: a rank's period in seconds, as a function of the number of ranks.
RATES: Mapping[str, Callable[[int], float]] = {
    "run.log(reduce=...): messages to the store per second": period_s,
    "heartbeats, which have the steps' times, per second": Watchdog().period_s,
}


def counted_by_kernels(part: list[dict[str, Any]]) -> str:
    from benchmarks.scale.counted import table

    rows = table(part)
    looks, chunks = (
        sum(phase.get(f"event {what}", 0) for run in part for phase in run["phases"].values())
        for what in ("look", "chunk")
    )
    return f"""### With real gloo ranks

{counts_table(rows)}

Four ranks per node, so that M = N / 4. Counted by the kernel at each rank: segments with data, one per message, that it
sent to rank 0's store and to the supervisor, with `preflight: true`. Periodic messages are counted as rates: a rank
that has called `run.log(reduce=...)` sends its values every 0.25 s and when rank 0 waits for them ({chunks} times in
these runs); a rank that has not checks every 5 s whether rank 0 has ({looks} times). The runs take only a few seconds,
so a single message changes these rates noticeably. A rank's period is constant up to about 1,024 ranks and longer
beyond; the rates for N = 16,384 are derived from it. gloo connects every rank with every other, so its messages grow
with the square of N; this is inherent in torch's gloo backend, and another reason to use
NCCL for many ranks."""


def exponents_steps() -> int:
    from benchmarks.scale.exponents import STEPS

    return STEPS


def listed(part: list[dict[str, Any]]) -> str:
    small, large = part[0]["runs"], part[-1]["runs"]
    return f"""## list

From {small:,} to {large:,} runs in one folder the CPU time of `list` grows with exponent {exponent(part):.2f}."""


def on_slurm(slurm: Mapping[str, Any], counts: Mapping[str, int]) -> str:
    """``counts``: the messages of each mechanism for as many simulated ranks."""
    controls, failure, handover, files = (slurm[name] for name in ("controls", "failure", "handover", "files"))
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
    beats = slurm["heartbeats"]
    return f"""## A real Slurm

Slurm {slurm["slurm"]} with {slurm["nodes"]} slurmds on this machine, {slurm["ranks"]} ranks without torch, one run:
their processes share its cores, which bounds the start. Messages are those counted above for as many simulated ranks;
a killed rank is named once all connections have ended, of which each counts as one.

{report.table(["", "s", "times `srun true`", "messages"], lines)}

Heartbeats: {beats["per_s"]:.0f} per second took {100 * beats["cpu_share"]:.1f}% of a core; the supervisor's peak memory
was {beats["peak_mb"]} MB, with {beats["files"]} open files. Log files: {files["logs"][0]} per attempt, and
{files["records"]} records of ends; history: {files["history_lines"]} lines."""


def with_gloo(gloo: Mapping[str, Any]) -> str:
    return f"""## Real gloo ranks

{gloo["ranks"]} ranks of DDP on this machine, 120 steps, preempted once: first step after {gloo["start_s"]} s, all ranks
stopping {gloo["told_to_stopping_s"]} s after the first was told, the next attempt {gloo["told_to_next_start_s"]} s
after that moment, its first step {gloo["resume_s"]} s later; {gloo["repeated"]} steps repeated. Rank 0 had
{gloo["sockets_rank_0"]} sockets, others up to {gloo["sockets_others"]}; peak memory {gloo["peak_mb"]} MB."""
