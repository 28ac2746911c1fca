"""The page: the matrix, ours beside the bound and the best peer, then each schedule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.peers.peers import LIMIT, PEERS
from benchmarks.peers.schedules import EPOCHS, PER_EPOCH, SCHEDULES
from benchmarks.peers.summary import Matrix, everything, leads, refreshed

NOT_RUN = "not run"


def write(folder: Path, cells: Sequence[dict[str, Any]], state: Path, words: str, note: str) -> None:
    """The page and the raw figures."""
    steps = max((cell["reached"] for cell in cells), default=EPOCHS * PER_EPOCH)
    matrix = Matrix(refreshed(cells, state), state / "finals", steps)
    found = everything(matrix)
    by_key = {(one["peer"], one["schedule"]): one for one in found}
    text = f"""# Beside what people use today

The same training under the same faults: {steps} steps of the bundled digits example, 2 nodes x 2 ranks, gloo,
{len(cells)} cells. **Read the notes at the end first.** {note}"""
    tables = {
        "What each promises, and what one writes": peers_table(),
        "Effective training time": matrix_table(by_key),
        "Ours beside the best peer that completed all cells": leads_table(by_key),
        **{f"`{name}`: {SCHEDULES[name].words}": schedule_table(name, by_key) for name in SCHEDULES},
    }
    figures = {
        "cluster": words,
        "steps": steps,
        "rows": matrix.rows(),
        "peers": {
            name: {"versions": peer.versions(), "lines": peer.lines(), "promise": peer.promise}
            for name, peer in PEERS.items()
        },
        "limit": {"start_s": matrix.start(), "each_s": matrix.each()},
        "matrix": found,
        "cells": matrix.cells,
    }
    report.write(folder, "peers", text, figures, where=words, tables=tables)


def peers_table() -> str:
    rows = []
    for name, peer in PEERS.items():
        lines = peer.lines()
        rows.append([name, peer.versions(), peer.promise, " + ".join(map(str, lines.values())), sum(lines.values())])
    return report.table(["", "version", "what its documentation promises", "lines", "sum"], rows)


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
    """Repetition by repetition."""
    lines = [
        [
            f"`{schedule}`",
            ours,
            f"{theirs:.2f} ({peer})",
            report.median(ratios),
            ", ".join(f"{one:.2f}" for one in ratios),
        ]
        for schedule, ours, peer, theirs, ratios in leads(by_key)
    ]
    return report.table(["", "clusterddp", "the best peer", "ratio", "of each repetition"], lines)


def schedule_table(name: str, by_key: dict[tuple[str, str], dict[str, Any]]) -> str:
    lines = []
    for peer in [*PEERS, LIMIT.name]:
        one = by_key[peer, name]
        if one["run"]:
            lines.append([peer, _wall(one), *_middle(one), _bits(one)])
        elif peer != LIMIT.name:
            lines.append([peer, NOT_RUN, *["-"] * 7])
    times = ["wall (alone)", "repeated", "handover", "to the next new step", "without progress"]
    return report.table(["", *times, "effective", "bound", "differing values"], lines)


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
