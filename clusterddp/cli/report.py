"""``clusterddp report``: one HTML file about a run, or a ranking of several, or the same data as JSON."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterddp.checkpoint.store import of_run
from clusterddp.errors import ClusterddpError, UsageError
from clusterddp.report.data import SCHEMA, collect
from clusterddp.report.page import page
from clusterddp.reporter import counted, put, say
from clusterddp.rundir.files import write_atomically
from clusterddp.rundir.run_directory import RunDirectory, find_runs
from clusterddp.rundir.summary import summarize
from clusterddp.runs import progress_display
from clusterddp.runs.sweep_members import MemberAndState, compare
from clusterddp.slurm.run_states import run_states
from clusterddp.version import __version__


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``report``."""
    parser.add_argument("run", nargs="+", metavar="RUN", help="run directories, folders of runs or patterns")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="the file to write, - for stdout (default: NAME-report.html in the current folder)",
    )
    parser.add_argument("--json", action="store_true", help="print the report's data as JSON (report.schema.json)")


def run(arguments: argparse.Namespace, _: object) -> int:
    """Runs ``report`` and returns the exit code."""
    runs = find_runs(arguments.run)
    output = None if arguments.output in (None, "-") else _file(arguments.output)
    data = collected(runs, time.time())
    text = json.dumps(data, indent=1) + "\n" if arguments.json else page(data)
    if output is None and (arguments.json or arguments.output == "-"):
        sys.stdout.write(text)
        return 0
    output = output or _file(f"{_name(arguments.run, runs)}-report.html")
    content = text.encode(errors="replace")
    if output.exists() and not output.is_file():  # a pipe or a device, such as /dev/null: do not replace it
        output.write_bytes(content)
    else:
        write_atomically(output, content)
    missing = [entry for entry in data["runs"] if entry["notes"]]
    if missing:
        say(f"the records of {counted(len(missing), 'run')} are incomplete. See 'Missing' in the report")
    put(str(output))
    return 0


def collected(runs: Sequence[RunDirectory], now: float) -> dict[str, Any]:
    """The data of a report, as docs/reference/report.schema.json describes it."""
    summaries = [summarize(one) for one in runs]
    found = list(zip(summaries, run_states(summaries), strict=True))
    values, notes = _values(found)
    collected = []
    for summary, state in found:
        data = collect(summary, state, progress_display.described, now)
        data["notes"] += notes + _damaged_checkpoint(summary.run)
        collected.append({**data, "values": values.get(summary.run.path, {})})
        notes = []  # about the sweep: once
    return {"schema": SCHEMA, "made": now, "version": __version__, "runs": collected}


def _values(found: Sequence[MemberAndState]) -> tuple[Mapping[Path, dict[str, str]], list[str]]:
    """The values of a sweep's members by run directory, none for other runs, and why they cannot be read."""
    values: dict[Path, dict[str, str]] = {}
    try:
        comparison = compare(found, ())
    except ClusterddpError as error:
        return values, [str(error)]
    for key, own in (comparison.values if comparison else {}).items():
        for path, text in own.items():
            values.setdefault(path, {})[key.rstrip("=")] = text
    return values, []


def _damaged_checkpoint(run: RunDirectory) -> list[str]:
    """What the header shows to be wrong with the checkpoint from which the run would continue."""
    try:
        for newest in of_run(run).candidates()[:1]:
            newest.check_header()
    except (ClusterddpError, OSError) as error:
        return [f"the newest checkpoint is damaged: {error}"]
    return []


def _file(name: str) -> Path:
    """The file to write. Raises UsageError if it cannot be one."""
    path = Path(name).absolute()
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"is in {path.parent}, which does not exist"
        raise UsageError(f"-o {name}: expected a file in an existing folder, but this {what}")
    return path


def _name(words: Sequence[str], runs: Sequence[RunDirectory]) -> str:
    """The file's name: that of the run or of the folder of runs, or ``runs``."""
    if len(runs) == 1:
        return runs[0].path.name
    folder = Path(words[0]).absolute()
    return folder.name if len(words) == 1 and folder.is_dir() else "runs"
