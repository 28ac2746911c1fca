"""``clusterddp list``: a table of runs, from their own files and one call of squeue."""

from __future__ import annotations

import argparse
import csv
import json
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from clusterddp.cli import live
from clusterddp.cli.live import LEAST_EVENTS, Size, composed
from clusterddp.cli.table import LEFT_OUT_WATCHED, Column, Row, columns, heading, ordered, table
from clusterddp.errors import UsageError
from clusterddp.events import sentence
from clusterddp.reporter import counted, printable, show
from clusterddp.rundir.run_directory import as_typed, find_runs, runs_folder
from clusterddp.rundir.summary import Summary, best_saved, summarize
from clusterddp.runs.run_status import report, values
from clusterddp.slurm.pace import PacedQueue
from clusterddp.slurm.run_states import WORDS, run_states

if TYPE_CHECKING:
    from clusterddp.runs.sweep_folder import Best, Comparison, Found
from functools import lru_cache
from typing import Any

from clusterddp.cli.live import sparkline
from clusterddp.reporter import duration, one_line
from clusterddp.rundir.progress import curve, main_metric
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.runs.run_status import booked, moment


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
        return live.watch(lambda size: _view(arguments, size, queue))
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
        kind = f"no runs that are {arguments.state}" if arguments.state else "no runs"
        show(f"{kind} in {', '.join(arguments.run) or runs_folder(os.environ)}")
    return 0


def _tell_unknown(found: _Found, names: list[str]) -> None:
    """Names the metrics of ``--show`` that no run has logged, and that have no column."""
    known = sorted({name for row in found.rows for name in values(row.summary)})
    if missing := [name for name in names if name not in [*known, *columns([], found.keys)]]:
        show(f"--show {','.join(missing)}: no run has logged this. Logged: {', '.join(known) or 'nothing yet'}")


def _view(arguments: argparse.Namespace, size: Size | None, queue: PacedQueue) -> live.View:
    """What --watch shows on a terminal of this size: the first runs with more columns, and the newest events."""
    found = _chosen(arguments, queue)
    most = size.lines - 2 * LEAST_EVENTS - 4 if size else len(found.rows)
    rows = found.rows[: max(1, most)]
    more = watched(rows, found.metrics, live.encoding())
    shown = columns(found.metrics, found.keys, more.columns)
    lines = table(rows, shown, size.columns if size else None, live.colour(), LEFT_OUT_WATCHED)
    more_rows = len(found.rows) - len(rows)
    lines += [f"and {counted(more_rows, 'more run')}"] * bool(more_rows) + [""]
    end = f"{time.strftime('%H:%M:%S')}, {heading(found.rows)}, every {live.EVERY_S:.0f} s until Ctrl-C"
    return live.View(composed(lines, more.events, end, size))


@dataclass(frozen=True)
class _Found:
    """The rows in their order, the columns, and the metrics among these. For a sweep, also the steps of the metrics."""

    rows: list[Row]
    shown: dict[str, Column]
    metrics: list[str]
    keys: Mapping[str, Mapping[Path, str]]
    steps: str | None


def _chosen(arguments: argparse.Namespace, queue: PacedQueue | None = None) -> _Found:
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
    return _Found(rows, shown, metrics, keys, sweep.sentence if sweep and metrics else None)


def _is_metric(name: str, summaries: Sequence[Summary]) -> bool:
    """Whether a name in ``--show`` or ``--sort`` is a metric's. The name of another column is one if it was logged."""
    if name not in columns([]):
        return True
    return name not in ("run", "state") and any(name in values(summary) for summary in summaries)


def _compared(pairs: list[Found], metrics: list[str]) -> Comparison | None:
    """The members of one sweep at equal steps. Imported here, because it loads the YAML reader."""
    if not any(summary.sweep for summary, _ in pairs):
        return None
    from clusterddp.runs.sweep_folder import compare

    return compare(pairs, metrics)


def _metric_of(best: str | None) -> str:
    """The metric of ``--best``, or an empty text."""
    if not best:
        return ""
    from clusterddp.runs.sweep_folder import metric_of

    return metric_of(best)[0]


def _best_row(found: _Found, metric: str) -> Row:
    from clusterddp.runs.sweep_folder import best

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


def _lines(found: _Found, metric: str | None) -> list[str]:
    lines = table(found.rows, found.shown, live.terminal_width(), live.colour())
    if sys.stdout.isatty():
        lines += ["", heading(found.rows), *([found.steps] if found.steps else [])]
    if metric and found.rows:
        from clusterddp.runs.sweep_folder import best

        winner = best([(row.summary, row.state) for row in found.rows], metric)
        lines += map(printable, (winner.sentence, _how_to_export(winner)))
    return lines


def _how_to_export(winner: Best) -> str:
    """The export command. If the run keeps its best checkpoint by the same metric, also that checkpoint."""
    command = f"clusterddp export {shlex.quote(as_typed(winner.run.path))}"
    kept = best_saved(winner.run.events())
    if kept is None or kept["metric"] != winner.metric:
        return f"Export it with: {command} model.safetensors"
    value = f"{kept['value']:.6g}" if isinstance(kept["value"], float) else kept["value"]
    return f"Its best value is {value} at checkpoint {kept['step']}. Export it with: {command} best model.safetensors"


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


#: The columns of a curve, and the most events of each run and in all.
CURVE_COLUMNS, EVENTS = 12, 20
Event = Mapping[str, Any]


@dataclass(frozen=True)
class Watched:
    """``columns``: texts by run directory, by the column's name. ``events``: lines, oldest first."""

    columns: Mapping[str, Mapping[Path, str]]
    events: list[str]


def watched(rows: Sequence[Row], metrics: Sequence[str], encoding: str) -> Watched:
    """What is shown of these runs. ``metrics``: those of --show. The first one is drawn."""
    now = time.time()
    trends, times, events = dict[Path, str](), dict[Path, str](), list[tuple[float, str]]()
    for row in rows:
        run, history = row.summary.run, _history(row.summary.run)
        trends[run.path] = _trend(row, next(iter(metrics), None), history, encoding)
        made = booked(row.summary, row.state, history, now)[1]
        times[run.path] = f"{100 * made.ettr:.0f}% of {duration(made.total_s)}" if made else ""
        events += _newest(row, history)
    events.sort()
    lines = [f"{moment(at)}  {words}" for at, words in events[-EVENTS:]]
    return Watched({"trend": trends, "ettr": times}, lines)


def _history(run: RunDirectory) -> tuple[dict[str, Any], ...]:
    """A run's events, read again only if there are new ones."""
    try:
        return _history_of(run.path, run.events_file.stat().st_size)
    except OSError:  # none yet, or another user's
        return ()


@lru_cache(maxsize=100)
def _history_of(run: Path, _size: int) -> tuple[dict[str, Any], ...]:
    return tuple(RunDirectory(run).events())


def _trend(row: Row, metric: str | None, history: Sequence[Event], encoding: str) -> str:
    name = metric or main_metric(values(row.summary))
    points = curve(row.summary.run.metrics_file, name, CURVE_COLUMNS, history) if name else []
    return sparkline(points, CURVE_COLUMNS, encoding) if len(points) > 1 else ""


def _newest(row: Row, history: Sequence[Event]) -> list[tuple[float, str]]:
    """When a run's newest events happened, and their sentences."""
    found: list[tuple[float, str]] = []
    for event in reversed(history):
        if words := sentence(event):
            found.append((event["time"], one_line(f"{row.summary.name}: {' '.join(words.split())}")))
        if len(found) == EVENTS:
            break
    return found
