"""``clusterddp list``: a table of runs, from their own files and one call of squeue."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from clusterddp.cli.runs import live
from clusterddp.cli.runs.report import report, values
from clusterddp.cli.runs.table import Column, Row, columns, heading, ordered, table
from clusterddp.errors import UsageError
from clusterddp.reporter import show
from clusterddp.rundir.find import find_runs
from clusterddp.rundir.summary import summarize
from clusterddp.slurm.run_states import WORDS, run_states


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``list``."""
    parser.add_argument(
        "run",
        nargs="*",
        metavar="RUN",
        help="run directories, folders of runs or patterns; default: $CLUSTERDDP_RUNS or ./runs",
    )
    parser.add_argument("--show", metavar="NAMES", default="", help="metrics to show, such as loss,accuracy")
    parser.add_argument("--state", metavar="STATES", default="", help=f"only runs in these states: {', '.join(WORDS)}")
    parser.add_argument(
        "--sort", metavar="NAME", help="sort by a column or metric, lowest first; default: newest runs first"
    )
    parser.add_argument("--reverse", action="store_true", help="the other way round")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON, one object per run (run.schema.json)")
    form.add_argument("--csv", action="store_true", help="print comma-separated values")
    form.add_argument("--watch", action="store_true", help="show the table anew every 5 s, until Ctrl-C")


def run(arguments: argparse.Namespace, _: object) -> int:
    """Carries out ``list``."""
    if arguments.watch:
        return live.watch(lambda: "\n".join(_lines(*_chosen(arguments)[:2])))
    rows, shown, metrics = _chosen(arguments)
    if arguments.json:
        print(json.dumps([report(row.summary, row.state) for row in rows], indent=1))
    elif arguments.csv:
        _print_csv(rows, metrics)
    elif rows:
        print("\n".join(_lines(rows, shown)))
    else:
        show("no runs" if not arguments.state else f"no runs that are {arguments.state}")
    return 0


def _chosen(arguments: argparse.Namespace) -> tuple[list[Row], dict[str, Column], list[str]]:
    """The rows in their order, the columns, and the metrics among these."""
    states, metrics = _states(arguments.state), _names(arguments.show)
    by = arguments.sort
    if by and by not in columns(metrics):
        metrics.append(by)
    shown = columns(metrics)
    summaries = [summarize(run, metrics) for run in find_runs(arguments.run)]
    rows = [Row(*pair) for pair in zip(summaries, run_states(summaries), strict=True)]
    if summaries and by in metrics and not any(by in row.summary.metrics for row in rows):
        known = sorted({name for row in rows for name in values(row.summary)})
        raise UsageError(f"--sort {by}: no such column or metric; available: {', '.join([*columns([]), *known])}")
    rows = [row for row in rows if not states or row.state.word in states]
    return ordered(rows, shown[by] if by else None, arguments.reverse), shown, metrics


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name for name in text.split(",") if name))


def _states(text: str) -> list[str]:
    names = _names(text)
    for name in names:
        if name not in WORDS:
            similar = get_close_matches(name, WORDS, 1)
            hint = f"; did you mean {similar[0]}?" if similar else ""
            raise UsageError(f"--state {name}: no such state; available: {', '.join(WORDS)}{hint}")
    return names


def _lines(rows: Sequence[Row], shown: Mapping[str, Column]) -> list[str]:
    lines = table(rows, shown, live.terminal_width(), live.colour())
    return [*lines, "", heading(rows)] if sys.stdout.isatty() else lines


def _print_csv(rows: Sequence[Row], metrics: Sequence[str]) -> None:
    """A line per run, with the keys of its report; its metrics are those that are shown, else all of them."""
    names = metrics or sorted({name for row in rows for name in values(row.summary)})
    lines = []
    for row in rows:
        keys = report(row.summary, row.state)
        found, saved = keys.pop("metrics"), keys.pop("saved") or {}
        keys |= {"ends": "; ".join(keys["ends"]), "saved_step": saved.get("step"), "saved_time": saved.get("time")}
        lines.append(keys | {f"metrics.{name}": found.get(name) for name in names})
    if lines:
        writer = csv.DictWriter(sys.stdout, lines[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
