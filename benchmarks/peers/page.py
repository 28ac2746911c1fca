"""The results of all cells, and the tables of docs/measurements/peers.md: the matrix, the bound, the best peer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.peers.peers import LIMIT, PEERS
from benchmarks.peers.schedules import EPOCHS, PER_EPOCH, SCHEDULES
from benchmarks.peers.summary import Matrix, everything, leads, refreshed
from tests import markdown

PAGE = Path("docs/measurements/peers.md")
TEXT = """# The same training under the same faults

The bundled digits example on 2 nodes with 2 gloo ranks each, by clusterddp and by what people use today.
[The page of this benchmark](../../docs/measurements/peers.md) says how to read the tables."""
Cells = Mapping[tuple[str, str], Mapping[str, Any]]


def write(folder: Path, cells: Sequence[dict[str, Any]], state: Path, words: str) -> None:
    """The results, and the tables of the page."""
    steps = max((cell["reached"] for cell in cells), default=EPOCHS * PER_EPOCH)
    matrix = Matrix(refreshed(cells, state), state / "finals", steps)
    found = matrix.rows()
    figures = {
        "cluster": words,
        "steps": steps,
        "peers": {
            name: {"versions": peer.versions(), "lines": peer.lines(), "promise": peer.promise}
            for name, peer in PEERS.items()
        },
        "limit": {"start_s": matrix.start(), "each_s": matrix.each()},
        "matrix": everything(matrix),
        "cells": matrix.cells,
    }
    common.write(folder, "peers", TEXT, common.Found(figures, found, words, tables(figures)))
    if folder == common.RESULTS:
        fill(json.loads((folder / "peers.json").read_text()))


def fill(figures: Mapping[str, Any]) -> None:
    """The page's tables, from the results."""
    names = {"peers": "What each promises", "training time": "Effective training time", "best peer": "The best peer"}
    made = tables(figures)
    shown = {name: made[heading] for name, heading in names.items()}
    markdown.fill(PAGE, {**shown, "bound": common.row_table(figures["rows"])})


def tables(figures: Mapping[str, Any]) -> dict[str, str]:
    """By heading."""
    cells = {(one["peer"], one["schedule"]): one for one in figures["matrix"]}
    lines = [
        [name, one["versions"], one["promise"], " + ".join(map(str, one["lines"].values())), sum(one["lines"].values())]
        for name, one in figures["peers"].items()
    ]
    best = [
        [f"`{schedule}`", ours, f"{theirs:.2f} ({peer})", common.median(ratios), ", ".join(f"{r:.2f}" for r in ratios)]
        for schedule, ours, peer, theirs, ratios in leads(cells)
    ]
    return {
        "What each promises": markdown.table(["", "version", "what its documentation promises", "lines", "sum"], lines),
        "Effective training time": matrix_table(cells),
        "The best peer": markdown.table(["", "clusterddp", "the best peer", "ratio", "of each repetition"], best),
        **{f"`{name}`: {SCHEDULES[name].words}": schedule_table(name, cells) for name in SCHEDULES},
    }


def matrix_table(cells: Cells) -> str:
    def shown(peer: str, schedule: str) -> str:
        one = cells[peer, schedule]
        if not one["run"]:
            return "-"
        if not one["completed"]:
            return "not done" if one["still_training"] else "**lost**"
        each = one["ettr_of_each"]
        return f"{one['ettr']:.2f}{f' ({min(each):.2f} to {max(each):.2f})' if len(each) > 1 else ''}{_incomplete(one)}"

    lines = [[peer, *(shown(peer, schedule) for schedule in SCHEDULES)] for peer in [*PEERS, LIMIT.name]]
    return markdown.table(["", *SCHEDULES], lines)


#: Of a peer under a schedule: the table's head, and the figure's name and form.
MEDIANS = {
    "repeated": ("repeated", "{:.0f}"),
    "handover": ("handover_s", "{:.1f} s"),
    "to the next new step": ("first_new_s", "{:.1f} s"),
    "without progress": ("gap_s", "{:.1f} s"),
    "effective": ("ettr", "{:.2f}"),
    "bound": ("bound", "{:.2f}"),
}


def schedule_table(schedule: str, cells: Cells) -> str:
    found = [one for peer in [*PEERS, LIMIT.name] if (one := cells[peer, schedule])["run"]]
    lines = [
        [
            one["peer"],
            _wall(one),
            *("-" if one[name] is None else form.format(one[name]) for name, form in MEDIANS.values()),
            _bits(one),
        ]
        for one in found
    ]
    return markdown.table(["", "wall (alone)", *MEDIANS, "differing values"], lines)


def _incomplete(one: Mapping[str, Any]) -> str:
    """How many of a peer's cells did not complete."""
    slow, lost = one["still_training"], one["run"] - one["completed"] - one["still_training"]
    words = [f"{count} of {one['run']} {word}" for word, count in (("not done", slow), ("lost", lost)) if count]
    return f" ({', '.join(words)})" if words else ""


def _wall(one: Mapping[str, Any]) -> str:
    if not one["completed"]:
        word = "not done," if one["still_training"] else "**lost**"
        return f"{word} at step {max(one['reached'])}: {', '.join(one['end'])}"
    alone = f" ({one['undisturbed_s']:.0f})" if one["undisturbed_s"] else ""
    return f"{one['wall_s']:.0f} s{alone}{_incomplete(one)}"


def _bits(one: Mapping[str, Any]) -> str:
    """The most of a peer's final values that differ from its undisturbed run's."""
    known = [count for count in one["differing"] if count is not None]
    if not known or one["peer"] == LIMIT.name or (one["schedule"] == "none" and len(known) == 1):
        return "-"
    return f"{max(known):,}" if max(known) else "none"
