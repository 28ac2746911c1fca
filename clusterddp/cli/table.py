"""The table of ``clusterddp list``: its columns, the order of its rows, and how it fits a terminal. Pure."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterddp.report import gpus
from clusterddp.reporter import clipped, columns_of, counted, duration, one_line, speed
from clusterddp.rundir.run_directory import runs_folder
from clusterddp.rundir.summary import Summary
from clusterddp.rundir.timing import newest_interval
from clusterddp.runs.run_status import left_s, values
from clusterddp.slurm.run_states import RunState

#: The columns to drop first on a narrow terminal, by default and with --watch.
LEFT_OUT = ("gpus", "ends", "nodes", "job", "attempts", "speed")
LEFT_OUT_WATCHED = ("gpus", "ends", "job", "attempts", "reason", "nodes", "ettr", "speed", "trend")


@dataclass(frozen=True)
class Row:
    """A run, and its state."""

    summary: Summary
    state: RunState


@dataclass(frozen=True)
class Column:
    """``value``: the sort key, None for a run without one. ``text``: the cell."""

    value: Callable[[Row], Any]
    text: Callable[[Row], str]
    right: bool = False
    most: int | None = None
    """The columns of a terminal that it may take."""


def columns(
    metrics: Sequence[str],
    keys: Mapping[str, Mapping[Path, str]] | None = None,
    watched: Mapping[str, Mapping[Path, str]] | None = None,
) -> dict[str, Column]:
    """The columns, in their order. ``metrics`` follow the time left.

    ``keys``: those of a sweep, with the values of its members by run directory. They follow the state. ``watched``:
    more columns of that kind, which follow the metrics.
    """
    here = [str(Path.cwd()), str(runs_folder(os.environ).absolute())]
    own = {name: _key(values) for name, values in (keys or {}).items()}
    return {
        "run": Column(lambda row: _path(row, here), lambda row: _path(row, here)),
        "state": Column(lambda row: row.state.word, lambda row: row.state.word),
        **own,
        "step": Column(lambda row: row.summary.step, _step, right=True),
        "speed": Column(_speed, lambda row: speed(row.summary.seconds_per_step), right=True),
        "left": Column(_left, lambda row: "" if (left := _left(row)) is None else duration(left), right=True),
        "gpus": Column(_busy, lambda row: "" if (busy := _busy(row)) is None else f"{busy}%", right=True),
        **{name: _metric(name) for name in metrics},
        **{name: _given(texts) for name, texts in (watched or {}).items()},
        "attempts": Column(lambda row: row.summary.attempts, lambda row: str(row.summary.attempts), right=True),
        "job": Column(lambda row: row.state.job_id, lambda row: row.state.job_id or "", right=True),
        "nodes": Column(lambda row: row.state.nodes or None, lambda row: row.state.nodes),
        "ends": Column(lambda row: len(row.summary.ends), _ends, most=40),
        "reason": Column(lambda row: row.state.reason or None, lambda row: " ".join(row.state.reason.split())),
    }


def ordered(rows: Sequence[Row], column: Column | None, reverse: bool) -> list[Row]:
    """The rows in ascending order of a column, or with ``reverse`` in descending order. Without a column, the newest
    runs come first and members of a sweep stay together.

    Runs without a value come last.
    """
    newest: dict[Path, float] = {}
    for row in rows:
        newest[_group(row)] = max(row.summary.started, newest.get(_group(row), 0.0))
    if column is None:
        return sorted(
            rows,
            key=lambda row: (newest[_group(row)], str(_group(row)), row.summary.started),
            reverse=not reverse,
        )
    by = column
    known = [row for row in rows if _is_known(by.value(row))]
    numbers = all(isinstance(by.value(row), (int, float)) for row in known)
    known.sort(key=by.value if numbers else lambda row: str(by.value(row)), reverse=reverse)
    return known + [row for row in rows if not _is_known(by.value(row))]


def _group(row: Row) -> Path:
    """The folder of a member's sweep."""
    path = row.summary.run.path
    return path.parent if row.summary.sweep else path


def table(
    rows: Sequence[Row],
    shown: Mapping[str, Column],
    width: int | None = None,
    colour: bool = False,
    left_out: Sequence[str] = LEFT_OUT,
) -> list[str]:
    """The lines of the table, with a heading. ``width``: the terminal's, or None for a pipe, which gets all columns.

    ``left_out``: the columns that a narrow terminal leaves out, in this order.
    """
    cells = {name: [*map(one_line, (name.upper(), *map(column.text, rows)))] for name, column in shown.items()}
    cells = {name: texts for name, texts in cells.items() if name in ("run", "state") or any(texts[1:])}
    widths = {name: max(map(columns_of, texts)) for name, texts in cells.items()}
    if width is None:  # keep one long reason from pushing all others out of sight
        widths = {name: min(columns, _WIDEST) for name, columns in widths.items()}
    else:
        limits = {name: shown[name].most or columns for name, columns in widths.items()}
        widths = _fitted({name: min(columns, limits[name]) for name, columns in widths.items()}, width, left_out)
    lines = []
    for index in range(len(rows) + 1):
        parts = [
            _padded(cells[name][index], widths[name], shown[name].right, name == "run", width is not None)
            for name in widths
        ]
        if colour and index:
            parts[1] = _coloured(parts[1], rows[index - 1].state.word)
        lines.append("  ".join(parts).rstrip())
    return lines


# --- cells


def _path(row: Row, here: Sequence[str]) -> str:
    """A name that commands accept for the run: relative to the current folder, or to the folder of new runs."""
    path = str(row.summary.run.path)
    return next((path.removeprefix(f"{folder}/") for folder in here if path.startswith(f"{folder}/")), path)


def _step(row: Row) -> str:
    step, steps = row.summary.step, row.summary.steps
    if step is None:
        return "" if row.summary.made is None else f"+{row.summary.made}"  # since the attempt began
    return str(step) if steps is None else f"{step}/{steps}"


def _speed(row: Row) -> float | None:
    return 1 / row.summary.seconds_per_step if row.summary.seconds_per_step else None


def _left(row: Row) -> float | None:
    return left_s(row.summary, row.state)


def _busy(row: Row) -> int | None:
    """How busy the GPUs of a run are that is being trained."""
    if row.state.word != "running":
        return None
    try:
        newest = newest_interval(row.summary.run)
    except OSError:  # another user's
        return None
    return None if newest is None else gpus.busy(gpus.newest([newest]))


def _metric(name: str) -> Column:
    def value(row: Row) -> Any:
        return values(row.summary).get(name)

    def text(row: Row) -> str:
        found = value(row)
        return "" if found is None else f"{found:.4g}" if isinstance(found, float) else str(found)

    return Column(value, text, right=True)


def _key(values: Mapping[Path, str]) -> Column:
    """A key of a sweep. Numbers are sorted as numbers."""

    from clusterddp.jobdef.yaml12 import scalar  # imported here, because it loads the YAML reader

    def value(row: Row) -> Any:
        text = values.get(row.summary.run.path)
        number = scalar(text) if text is not None else None
        return number if isinstance(number, (int, float)) else text

    return Column(value, lambda row: values.get(row.summary.run.path, ""), right=True)


def _given(texts: Mapping[Path, str]) -> Column:
    def text(row: Row) -> str:
        return texts.get(row.summary.run.path, "")

    return Column(text, text)


def _ends(row: Row) -> str:
    """``preempted x2, node n2 lost``. How the whole run ended is its reason."""
    over = row.summary.outcome is not None and row.summary.ends[-1:] == (row.state.reason,)
    ends = row.summary.ends[:-1] if over else row.summary.ends
    counts = Counter(" ".join(reason.split()) for reason in ends)
    return ", ".join(f"{reason} x{number}" if number > 1 else reason for reason, number in counts.items())


def _is_known(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value))


# --- layout

#: The fewest columns of a reason that are worth showing.
_LEAST_REASON = 16
#: The columns that a run's path keeps before other columns are dropped. The end of a path identifies the run.
_LEAST_RUN = 24
#: The most columns that cells are padded to in a pipe.
_WIDEST = 40
_COLOURS = {"completed": 32, "running": 36, "failed": 31, "cancelled": 31, "pending": 33, "held": 33, "unknown": 35}


def _fitted(widths: dict[str, int], width: int, left_out: Sequence[str]) -> dict[str, int]:
    """Widths that fit, after clipping the reason and the run's path and dropping columns."""
    path = widths["run"]
    widths = {**widths, "run": min(path, _LEAST_RUN)}

    def room(name: str) -> int:
        return width - sum(other + 2 for column, other in widths.items() if column != name)

    for name in left_out:
        if room("reason") >= min(widths.get("reason", 0), _LEAST_REASON):
            break
        widths.pop(name, None)
    if "reason" in widths:
        widths["reason"] = min(widths["reason"], room("reason"))
        if widths["reason"] < _LEAST_REASON:
            del widths["reason"]
    widths["run"] = max(8, min(path, room("run")))
    return widths


def _padded(text: str, width: int, right: bool, keep_end: bool, clips: bool) -> str:
    text = clipped(text, width, keep_end) if clips else text
    space = " " * (width - columns_of(text))
    return space + text if right else text + space


def _coloured(text: str, word: str) -> str:
    return f"\x1b[{_COLOURS[word]}m{text}\x1b[0m" if word in _COLOURS else text


def heading(rows: Sequence[Row]) -> str:
    """``12 runs: 3 running, 9 completed``."""
    counts = Counter(row.state.word for row in rows)
    return f"{counted(len(rows), 'run')}: {', '.join(f'{number} {word}' for word, number in counts.most_common())}"
