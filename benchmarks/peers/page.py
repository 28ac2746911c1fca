"""The page: caveats first, then the matrix, then each schedule."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.peers.peers import LIMIT, PEERS, Peer
from benchmarks.peers.schedules import CELL_S, EPOCHS, HIGH_S, PER_EPOCH, SAVE_EPOCHS, SCHEDULES
from benchmarks.peers.summary import ALLOWED, LEAST, OURS, Matrix, everything, leads, refreshed
from benchmarks.rows import table as rows_table

NOT_RUN = "not run"

CAVEATS = f"""## Read this first

- **Written by us.** The scripts of all peers are in `benchmarks/peers/scripts/`, configured as their documentation
  says; each names the page. None of these projects has reviewed them. Corrections are welcome.
- **The schedules are scaled.** A fault every 60 or 90 s stands for one every 20 or 30 minutes; a step is padded by
  100 ms; a checkpoint is saved every {SAVE_EPOCHS * PER_EPOCH} steps, about every 20 s. A start of 10 s weighs
  twenty times more here than there. What is lost, and what is not, can be carried over to a real cluster; the ratios
  cannot.
- **Slurm reacts faster than by default**: a requeued job is held for 7 s (default: 121 s), a silent node is down after
  40 s (300 s), KillWait is 10 s (30 s). Nobody lifts the hold here, not `clusterddp watch` either.
- **A busy machine.** Other work ran beside the benchmark, and several cells at a time shared the CPUs. Starts (imports)
  vary by a factor of two between equal cells. Wall times of two peers that differ by less than 20% do not differ.
- **Unfair to peers**: "lost" means lost without a person. A handwritten script, accelerate, the Trainer and torchrun do
  not promise to requeue themselves: resubmitted by hand, or with `scontrol requeue` in the batch script, most of these
  runs would continue from their last checkpoint. submitit handles a preemption where Slurm sends its signal first
  (`PreemptParameters=send_user_signal`, off by default and off here). GraceTime decides who survives: with 0, Slurm
  requeues by itself, no matter what the ranks do; with a grace, a job that ends within it is over.
- **Unfair to clusterddp**: it checks and syncs every checkpoint, which buys nothing in this table. Its loader draws
  another order than the peers', so final values are compared with each peer's own undisturbed run, never across.
- **Equal patience**: 60 s in a collective (`timeout=`, `ddp_timeout`) and 60 s for clusterddp's watchdog. With their
  defaults, 30 minutes for gloo and 10 minutes for the watchdog, every cell with a hang would be lost.
- **torchrun's tutorial saves no optimizer**, so its resumed runs differ by design. It trains on GPUs with NCCL. With
  gloo the restarted ranks connect to the addresses of the ranks that have ended ("Gloo connectFullMesh failed",
  torch 2.13), mostly until --max-restarts is used up.
- A cell ends after {CELL_S:g} s. A run that still made new steps then is "not done", else "lost", though it might still
  continue: after 30 minutes, or when its time limit ends it and a person submits it once more."""

COUNTING = """Lines: those with code, of the script and of the batch script or job definition: not blank, no comments,
no docstrings, and not those of the benchmark (imports of `steplog` and `common`, calls of `steplog()` and `finish()`).
The model and the data are imported by all."""


def describe(cells: Sequence[dict[str, Any]], state: Path, words: str, note: str = "") -> tuple[str, dict[str, Any]]:
    """The report and the raw figures."""
    steps = max((cell["reached"] for cell in cells), default=EPOCHS * PER_EPOCH)
    matrix = Matrix(refreshed(cells, state), state / "finals", steps)
    found = everything(matrix)
    by_key = {(one["peer"], one["schedule"]): one for one in found}
    rows = matrix.rows()
    text = f"""# Beside what people use today

The same training under the same faults: {steps} steps of the bundled digits example, 2 nodes x 2 ranks, gloo.
{report.place(words)} {date.today()}, `make bench-peers`.
{len(cells)} cells. The tables of the peers have the medians of the repetitions that all peers have
({max((one["run"] for one in found), default=0)} at most), the comparison with the bound has all. {note}

{CAVEATS}

## What each promises, and what one writes

{peers_table()}

{COUNTING}

## Effective training time

Steps x the mean step, over the wall time from the submission to the last step. The step is the cell's own, between
interruptions: with the undisturbed run's, which is in the JSON file, a machine that was busier in one cell than in the
other would count as a fault's cost. The last row, the limit, is a DDP script without checkpoints that continues after
its last step for free, in a batch script that ends with its ranks: what Slurm, imports and the rendezvous cost.

{matrix_table(by_key)}

{leads_table(by_key)}

{ours_text(matrix, rows)}

## Each schedule

{chr(10).join(schedule_text(name, by_key) for name in SCHEDULES)}"""
    figures = {
        "command": "python -m benchmarks.peers",
        "date": str(date.today()),
        "cluster": words,
        "steps": steps,
        "rows": rows,
        "peers": {
            name: {"versions": peer.versions(), "lines": peer.lines(), "promise": peer.promise}
            for name, peer in PEERS.items()
        },
        "limit": {"start_s": matrix.start(), "each_s": matrix.each()},
        "matrix": found,
        "cells": matrix.cells,
    }
    return text, figures


def peers_table() -> str:
    rows = []
    for name, peer in PEERS.items():
        lines = peer.lines()
        rows.append([name, peer.versions(), _promise(peer), " + ".join(map(str, lines.values())), sum(lines.values())])
    return report.table(["", "version", "what its documentation promises", "lines", "sum"], rows)


def _promise(peer: Peer) -> str:
    return f"{peer.promise} ({', '.join(f'`{name}`' for name in peer.files)})"


def matrix_table(by_key: dict[tuple[str, str], dict[str, Any]]) -> str:
    def cell(peer: str, schedule: str) -> str:
        one = by_key[peer, schedule]
        if not one["run"]:
            return NOT_RUN if peer != LIMIT.name else "-"
        if not one["completed"]:
            return "not done" if one["still_training"] else "**lost**"
        lost = f" ({_incomplete(one)})" if one["completed"] < one["run"] else ""
        each = one["ettr_of_each"]
        return f"{one['ettr']:.2f}{f' ({min(each):.2f} to {max(each):.2f})' if len(each) > 1 else ''}{lost}"

    head = ["", *SCHEDULES]
    rows = [[peer, *(cell(peer, schedule) for schedule in SCHEDULES)] for peer in [*PEERS, LIMIT.name]]
    return report.table(head, rows)


def leads_table(by_key: dict[tuple[str, str], dict[str, Any]]) -> str:
    """Ours beside the best peer, repetition by repetition."""
    rows = [
        [f"`{schedule}`", f"{ours:.2f}", f"{theirs:.2f} ({peer})", f"{report.median(ratios):.2f}", _span(ratios)]
        for schedule, ours, peer, theirs, ratios in leads(by_key)
    ]
    table = report.table(["", "clusterddp", "the best peer", "ratio", "of each repetition"], rows)
    return f"""\
Beside the best of the peers that completed all cells of a schedule (above 1: clusterddp trained for a larger share of
the time). Under the schedules that are not here, no peer completed them all.

{table}"""


def _span(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def ours_text(matrix: Matrix, rows: Sequence[dict[str, Any]]) -> str:
    """Ours beside the bound."""
    table = rows_table(rows)
    start, each = f"{matrix.start():.1f} s", f"{matrix.each():.1f} s"
    return f"""\
The bound, by the formula of arXiv 2410.21680 with a fixed number of interruptions n: P / (P + u + n q), where P is the
time of the steps, u the start of the limit (median {start}), q what it loses with a preemption (mean {each}: Slurm's
hold, imports, rendezvous). Without a notice q is another start and half a checkpoint interval; the time until a dead
node or a hang is noticed (40 and 60 s) is not in the bound. A cell's u and q are those of the limit's cells that ran
beside it, else those within a quarter of an hour, else all.

{table}

The bound's wall time has nothing in it but the cell's steps, u and n q. An interval of no width is that of a single
cell. The bar: under a preemption every 60 s the effective training time is at least {ALLOWED} of the bound, so the wall
time at most {1 / ALLOWED:.3f} times the bound's; it is judged from {LEAST} cells on.

{profile_text(matrix)}"""


def profile_text(matrix: Matrix) -> str:
    """Where the seconds of ours went under the densest preemptions, by its own booking."""
    cells = [cell for cell in matrix.of(OURS, "preempt-60", completed=True) if cell.get("booked")]
    if not cells:
        return ""
    booked = cells[0]["booked"]
    shares = [[name, seconds] for name, seconds in booked["seconds"].items() if seconds >= 0.05]
    return f"""Where the seconds of clusterddp's first run under `preempt-60` went, by `clusterddp report --json`
({booked["total_s"]:.0f} s):

{report.table(["category", "seconds"], shares)}"""


def schedule_text(name: str, by_key: dict[tuple[str, str], dict[str, Any]]) -> str:
    rows = []
    for peer in [*PEERS, LIMIT.name]:
        one = by_key[peer, name]
        if not one["run"]:
            rows += [[peer, NOT_RUN, *["-"] * 7]] if peer != LIMIT.name else []
            continue
        rows.append([peer, _wall(one), *_middle(one), _bits(one)])
    head = [
        "",
        "wall (alone)",
        "repeated",
        "handover",
        "to the next new step",
        "without progress",
        "effective",
        "bound",
    ]
    return f"### `{name}`: {SCHEDULES[name].words}\n\n{report.table([*head, 'differing values'], rows)}\n{_note(name)}"


def _note(name: str) -> str:
    if not name.startswith("preempt"):
        return ""
    return (
        f"\nHandover: from the first TERM, by slurmd's log, to the first command of the job that takes the nodes for "
        f"{HIGH_S:g} s.\n"
    )


def _incomplete(one: dict[str, Any]) -> str:
    """How many of a peer's cells did not complete."""
    slow, lost = one["still_training"], one["run"] - one["completed"] - one["still_training"]
    words = {"not done": slow, "lost": lost}
    return ", ".join(f"{count} of {one['run']} {word}" for word, count in words.items() if count)


def _wall(one: dict[str, Any]) -> str:
    if not one["completed"]:
        word = "not done," if one["still_training"] else "**lost**"
        return f"{word} at step {max(one['reached'])}: {', '.join(one['end'])}"
    alone = f" ({one['undisturbed_s']:.0f})" if one["undisturbed_s"] else ""
    lost = f"; {_incomplete(one)}" if one["completed"] < one["run"] else ""
    return f"{one['wall_s']:.0f} s{alone}{lost}"


def _middle(one: dict[str, Any]) -> list[str]:
    def seconds(key: str) -> str:
        return "-" if one[key] is None else f"{one[key]:.1f} s"

    repeated = "-" if one["repeated"] is None else f"{one['repeated']:.0f}"
    shares = ["-" if one[key] is None else f"{one[key]:.2f}" for key in ("ettr", "bound")]
    return [repeated, seconds("handover_s"), seconds("first_new_s"), seconds("gap_s"), *shares]


def _bits(one: dict[str, Any]) -> str:
    known = [count for count in one["differing"] if count is not None]
    if not known or one["peer"] == LIMIT.name:
        return "-"
    if one["schedule"] == "none" and len(known) == 1:
        return "-"  # it is what the others are compared with
    return "none" if max(known) == 0 else f"{max(known):,}"
