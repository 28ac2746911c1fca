"""``clusterddp list``: a table of runs, from their own files and one call of squeue.

The columns, the order of the rows, and how the table fits a terminal are pure functions.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterddp.cli import live
from clusterddp.errors import UsageError
from clusterddp.report import efficiency
from clusterddp.reporter import clipped, columns_of, counted, duration, one_line, printable, show, speed, value_text
from clusterddp.rundir.run_directory import as_typed, find_runs, runs_folder
from clusterddp.rundir.summary import Summary, best_saved, summarize
from clusterddp.rundir.timing import newest_interval
from clusterddp.runs.run_report import left_s, report, values
from clusterddp.slurm.polling import PacedQueue
from clusterddp.slurm.run_states import WORDS, RunState, run_states

if TYPE_CHECKING:
    from clusterddp.runs.sweep_members import Best, Comparison, MemberAndState


#: The columns to drop first on a narrow terminal, in this order.
LEFT_OUT = ("gpus", "ends", "nodes", "job", "attempts", "speed")


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


def columns(metrics: Sequence[str], keys: Mapping[str, Mapping[Path, str]] | None = None) -> dict[str, Column]:
    """The columns, in their order. ``metrics`` follow the time left.

    ``keys``: those of a sweep, with the values of its members by run directory. They follow the state.
    """
    here = [str(Path.cwd()), str(runs_folder(os.environ).absolute())]
    own = {name: _key(values) for name, values in (keys or {}).items()}
    return {
        "run": Column(lambda row: _path(row, here), lambda row: _path(row, here)),
        "state": Column(lambda row: row.state.word, lambda row: row.state.word),
        **own,
        "step": Column(lambda row: row.summary.step, _step, right=True),
        "speed": Column(_speed, lambda row: speed(row.summary.seconds_per_step), right=True),
        "left": Column(
            lambda row: left_s(row.summary, row.state),
            lambda row: "" if (left := left_s(row.summary, row.state)) is None else duration(left),
            right=True,
        ),
        "gpus": Column(_busy, lambda row: "" if (busy := _busy(row)) is None else f"{busy}%", right=True),
        **{name: _metric(name) for name in metrics},
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
    rows: Sequence[Row], shown: Mapping[str, Column], width: int | None = None, colour: bool = False
) -> list[str]:
    """The lines of the table, with a heading. ``width``: the terminal's, or None for a pipe, which gets all columns."""
    cells = {name: [*map(one_line, (name.upper(), *map(column.text, rows)))] for name, column in shown.items()}
    cells = {name: texts for name, texts in cells.items() if name in ("run", "state") or any(texts[1:])}
    widths = {name: max(map(columns_of, texts)) for name, texts in cells.items()}
    if width is None:  # keep one long reason from pushing all others out of sight
        widths = {name: min(columns, _WIDEST) for name, columns in widths.items()}
    else:
        limits = {name: shown[name].most or columns for name, columns in widths.items()}
        widths = _fitted({name: min(columns, limits[name]) for name, columns in widths.items()}, width)
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
    again = f" ({row.summary.redone} again)" if row.summary.redone else ""
    if step is None:
        return "" if row.summary.made is None else f"+{row.summary.made}{again}"  # since the attempt began
    return (str(step) if steps is None else f"{step}/{steps}") + again


def _speed(row: Row) -> float | None:
    return 1 / row.summary.seconds_per_step if row.summary.seconds_per_step else None


def _busy(row: Row) -> int | None:
    """How busy the GPUs of a run are that is being trained."""
    if row.state.word != "running":
        return None
    try:
        newest = newest_interval(row.summary.run)
    except OSError:  # another user's
        return None
    return None if newest is None else efficiency.gpus_busy(efficiency.newest_gpu_rows([newest]))


def _metric(name: str) -> Column:
    def value(row: Row) -> Any:
        return values(row.summary).get(name)

    def text(row: Row) -> str:
        found = value(row)
        return "" if found is None else value_text(found)

    return Column(value, text, right=True)


def _key(values: Mapping[Path, str]) -> Column:
    """A key of a sweep. Numbers are sorted as numbers."""

    from clusterddp.jobdef.yaml12 import scalar  # imported here, because it loads the YAML reader

    def value(row: Row) -> Any:
        text = values.get(row.summary.run.path)
        number = scalar(text) if text is not None else None
        return number if isinstance(number, (int, float)) else text

    return Column(value, lambda row: values.get(row.summary.run.path, ""), right=True)


def _ends(row: Row) -> str:
    """``preempted x2, node n2 lost``. The column of the reason has the last one already, and earlier ones like it are
    ``same x2``."""
    last = " ".join(row.state.reason.split())
    ends = [" ".join(reason.split()) for reason in row.summary.ends]
    if ends and ends[-1] and ends[-1] in last:
        ends = ["same" if reason and reason in last else reason for reason in ends[:-1]]
    return ", ".join(f"{reason} x{number}" if number > 1 else reason for reason, number in Counter(ends).items())


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


def _fitted(widths: dict[str, int], width: int) -> dict[str, int]:
    """Widths that fit, after clipping the reason and the run's path and dropping columns."""
    path = widths["run"]
    widths = {**widths, "run": min(path, _LEAST_RUN)}

    def room(name: str) -> int:
        return width - sum(other + 2 for column, other in widths.items() if column != name)

    for name in LEFT_OUT:
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``list``."""
    parser.add_argument(
        "run",
        nargs="*",
        metavar="RUN",
        help="run directories, folders of runs or patterns (default: $CLUSTERDDP_RUNS or ./runs)",
    )
    parser.add_argument("--show", metavar="NAMES", default="", help="metrics to show, such as loss,accuracy")
    parser.add_argument("--state", metavar="STATES", default="", help=f"only runs in these states: {', '.join(WORDS)}")
    parser.add_argument(
        "--sort", metavar="NAME", help="sort by a column or metric, lowest first (default: newest runs first)"
    )
    parser.add_argument("--reverse", action="store_true", help="reverse the order")
    parser.add_argument(
        "--best", metavar="METRIC", help="name the run with the best value, such as accuracy, loss or 'score min'"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON, one object per run (run.schema.json)")
    form.add_argument("--csv", action="store_true", help="print comma-separated values")
    form.add_argument("--watch", action="store_true", help="refresh the table every 5 s until Ctrl-C")


def run(arguments: argparse.Namespace, _: object) -> int:
    """Runs ``list`` and returns the exit code."""
    if arguments.watch:
        queue = PacedQueue()
        return live.watch(lambda: live.View(_lines(_chosen(arguments, queue), arguments.best)))
    found = _chosen(arguments)
    if arguments.json or arguments.csv:
        chosen = [_best_row(found, arguments.best)] if arguments.best else found.rows
        if arguments.json:
            print(json.dumps([report(row.summary, row.state) for row in chosen], indent=1))
        else:
            _print_csv(chosen, found.metrics)
    elif found.rows:
        print("\n".join(_lines(found, arguments.best)))
        if found.steps and not sys.stdout.isatty():
            show(found.steps)
        _tell_unknown(found, _names(arguments.show))
    else:
        states, where = _names(arguments.state), ", ".join(arguments.run) or runs_folder(os.environ)
        show(f"no {' or '.join(states)} runs in {where}" if states else f"no runs in {where}")
    return 0


def _tell_unknown(found: _Selection, names: list[str]) -> None:
    """Names the metrics of ``--show`` that no run has logged, and that have no column."""
    known = sorted({name for row in found.rows for name in values(row.summary)})
    if missing := [name for name in names if name not in [*known, *columns([], found.keys)]]:
        show(f"--show: no run has logged {' or '.join(missing)}. Logged: {', '.join(known) or 'nothing yet'}")


@dataclass(frozen=True)
class _Selection:
    """The rows in their order, the columns, and the metrics among these. For a sweep, also the steps of the metrics."""

    rows: list[Row]
    shown: dict[str, Column]
    metrics: list[str]
    keys: Mapping[str, Mapping[Path, str]]
    steps: str | None


def _chosen(arguments: argparse.Namespace, queue: PacedQueue | None = None) -> _Selection:
    states, by = _states(arguments.state), arguments.sort
    metrics = _names(f"{arguments.show},{_metric_of(arguments.best)}")
    wanted = [*metrics, by] if by and by not in columns(metrics) else metrics
    summaries = [summarize(run, wanted) for run in find_runs(arguments.run)]
    pairs = list(zip(summaries, run_states(summaries, queue=queue), strict=True))
    metrics, wanted = ([name for name in names if _is_metric(name, summaries)] for names in (metrics, wanted))
    sweep = _compared(pairs, wanted)
    if sweep and by not in metrics and f"{by}=" in sweep.values:
        by = f"{by}="
    else:
        metrics = wanted
    keys = sweep.values if sweep else {}
    shown = columns(metrics, keys)
    rows = [Row(*pair) for pair in (sweep.members if sweep else pairs)]
    if summaries and by in metrics and not any(by in row.summary.metrics for row in rows):
        known = sorted({name for row in rows for name in values(row.summary)})
        raise UsageError(f"--sort {by}: no such column or metric. Available: {', '.join([*columns([]), *known])}")
    rows = [row for row in rows if not states or row.state.word in states]
    rows = ordered(rows, shown[by] if by else None, arguments.reverse)
    return _Selection(rows, shown, metrics, keys, sweep.sentence if sweep and metrics else None)


def _is_metric(name: str, summaries: Sequence[Summary]) -> bool:
    """Whether a name in ``--show`` or ``--sort`` is a metric's. The name of another column is one if it was logged."""
    if name not in columns([]):
        return True
    return name not in ("run", "state") and any(name in values(summary) for summary in summaries)


def _compared(pairs: list[MemberAndState], metrics: list[str]) -> Comparison | None:
    """The members of one sweep at equal steps. Imported here, because it loads the YAML reader."""
    if not any(summary.sweep for summary, _ in pairs):
        return None
    from clusterddp.runs.sweep_members import compare

    return compare(pairs, metrics)


def _metric_of(best: str | None) -> str:
    """The metric of ``--best``, or an empty text."""
    if not best:
        return ""
    from clusterddp.runs.sweep_members import metric_of

    return metric_of(best)[0]


def _best_row(found: _Selection, metric: str) -> Row:
    from clusterddp.runs.sweep_members import best

    run = best([(row.summary, row.state) for row in found.rows], metric).run
    return next(row for row in found.rows if row.summary.run is run)


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name for name in text.split(",") if name))


def _states(text: str) -> list[str]:
    names = _names(text)
    for name in names:
        if name not in WORDS:
            similar = get_close_matches(name, WORDS, 1)
            hint = f". Did you mean {similar[0]}?" if similar else ""
            raise UsageError(f"--state {name}: no such state. Available: {', '.join(WORDS)}{hint}")
    return names


def _lines(found: _Selection, metric: str | None) -> list[str]:
    lines = table(found.rows, found.shown, live.terminal_width(), live.coloured(sys.stdout))
    if sys.stdout.isatty():
        lines += ["", heading(found.rows), *([found.steps] if found.steps else [])]
    if metric and found.rows:
        from clusterddp.runs.sweep_members import best

        winner = best([(row.summary, row.state) for row in found.rows], metric)
        lines += map(one_line, (winner.sentence, _how_to_export(winner)))
    return lines


def _how_to_export(winner: Best) -> str:
    """The export command. If the run keeps its best checkpoint by the same metric, also that checkpoint."""
    command = f"clusterddp export {shlex.quote(as_typed(winner.run.path))}"
    kept = best_saved(winner.run.history())
    if kept is None or kept.metric != winner.metric:
        return f"Export it with: {command} model.safetensors"
    value = f"{kept.value:.6g}" if isinstance(kept.value, float) else kept.value
    return f"Its best value is {value} at checkpoint {kept.step}. Export it with: {command} best model.safetensors"


def _print_csv(rows: Sequence[Row], metrics: Sequence[str]) -> None:
    """A line per run, with the keys of its report and the metrics that are shown, or else all of them."""
    names = metrics or sorted({name for row in rows for name in values(row.summary)})
    lines = []
    for row in rows:
        keys = report(row.summary, row.state)
        found, saved = keys.pop("metrics"), keys.pop("saved") or {}
        keys |= {"ends": "; ".join(keys["ends"]), "saved_step": saved.get("step"), "saved_time": saved.get("time")}
        lines.append(keys | {f"metrics.{name}": found.get(name) for name in names})
    if lines:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        for cells in (lines[0], *(line.values() for line in lines)):
            writer.writerow([printable(cell) if isinstance(cell, str) else cell for cell in cells])
