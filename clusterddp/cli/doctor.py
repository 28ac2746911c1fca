"""``clusterddp doctor``: checks what a run needs, on the login node or, with ``--nodes``, on nodes.

With ``--failed-nodes``, it lists the nodes on which runs failed, with a text for the administrator.
"""

from __future__ import annotations

import argparse
import json
import os
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from clusterddp.checks.login_node import login_checks, slurm_checks
from clusterddp.checks.node import FAILED, Check, worst
from clusterddp.checks.nodes_job import check_nodes, configured, summary
from clusterddp.cli.live import terminal_width
from clusterddp.errors import RunDirectoryError, UsageError
from clusterddp.failures.node_memory import FOLDER, UNLESS, by_node, is_avoided, letter, recall, weight
from clusterddp.history.view import RunView
from clusterddp.report.efficiency import lost_nodes, node_hours
from clusterddp.reporter import counted, duration, put, show
from clusterddp.rundir.run_directory import find_runs, runs_folder

#: The format of ``--json``.
SCHEMA = 1
#: Options that only the job of ``--nodes`` uses.
OF_THE_JOB = {"gpus_per_node": "--gpus", "device": "--device", "account": "-A"}
#: Options that ``--failed-nodes`` does not use.
OF_CHECKS = {"nodes": "--nodes", **OF_THE_JOB, "partition": "-p", "qos": "-q", "on": "--on"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``doctor``."""
    parser.add_argument("-N", "--nodes", type=int, metavar="N", help="check N nodes with a job of about a minute")
    parser.add_argument(
        "--gpus", "--gpus-per-node", dest="gpus_per_node", metavar="G",
        help="with --nodes: GPUs per node, or TYPE:G (default: all). With --device cpu, ranks per node (default: 1)",
    )  # fmt: skip
    parser.add_argument("--device", metavar="cuda|cpu", help="with --nodes: cuda (NCCL, the default) or cpu (gloo)")
    parser.add_argument("-p", "--partition", metavar="NAME", help="partition, as in sbatch (default: as in submit)")
    parser.add_argument("-A", "--account", metavar="NAME", help="with --nodes: account to charge, as in sbatch")
    parser.add_argument("-q", "--qos", metavar="NAME", help="quality of service, as in sbatch")
    parser.add_argument("--on", metavar="TARGET", help="use the values of a target, as in submit")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    failed = parser.add_argument_group("failed nodes")
    failed.add_argument(
        "--failed-nodes", nargs="?", const="", metavar="FOLDER",
        help="list the nodes on which runs in this folder failed, and print a message for the administrator (default: "
        "$CLUSTERDDP_RUNS, else ./runs)",
    )  # fmt: skip
    failed.add_argument(
        "--group", action="store_true", help="also count failures that other members of the folder's group recorded"
    )


def run(arguments: argparse.Namespace, _: object) -> int:
    """Prints a row per check, or per node. Returns 0 if none failed. With ``--failed-nodes``, always returns 0."""
    if arguments.failed_nodes is not None:
        given = [option for key, option in OF_CHECKS.items() if getattr(arguments, key) is not None]
        if given := [*given, *(["--json"] if arguments.json else [])]:
            raise UsageError(f"{' and '.join(given)} cannot be combined with --failed-nodes, which checks nothing")
        list_failed_nodes(arguments.failed_nodes, arguments.group)
        return 0
    if arguments.group:
        raise UsageError("--group requires --failed-nodes. Add it to list the nodes on which runs failed")
    if arguments.nodes is None:
        if given := [option for key, option in OF_THE_JOB.items() if getattr(arguments, key) is not None]:
            raise UsageError(
                f"{' and '.join(given)} {'requires' if len(given) == 1 else 'require'} --nodes. Add --nodes N, the "
                "number of nodes to check"
            )
        job, _ = configured(arguments)
        checks, preempted = slurm_checks(job.partition, job.qos)
        checks += login_checks(os.environ)
        lost = lost_nodes(_histories(), time.time())
        results: dict[str, Any] = {"checks": [check.as_json() for check in checks], "preemption": preempted}
        results["lost_nodes"] = lost
        last = [f"preemption: {preempted}", *([_spares(lost)] if lost else [])]
    else:
        nodes = check_nodes(arguments)
        checks = [node.row for node in nodes]
        results, last = {"nodes": [node.as_json() for node in nodes]}, [summary(nodes)]
    state = worst(checks)
    if arguments.json:
        print(json.dumps({"schema": SCHEMA, "state": state, **results}, indent=1))
    else:
        columns = terminal_width()  # None in a pipe, whose lines are not wrapped
        ends = last if columns is None else [part for line in last for part in _wrapped(line, columns)]
        print("\n".join([*rows(checks, columns), *ends]))
    return int(state == FAILED)


def _histories() -> Iterator[RunView]:
    """Those of the runs in the folder for runs. A run whose history cannot be read is skipped."""
    for run in find_runs(()):
        with suppress(OSError, RunDirectoryError):
            yield run.history()


def _spares(lost: Mapping[str, float]) -> str:
    """What lost nodes cost the runs, and what spare nodes would have cost and saved."""
    runs, jobs = counted(int(lost["runs"]), "run"), counted(int(lost["jobs"]), "job")
    return (
        f"lost nodes: they ended {jobs} of {runs} without spare nodes in {runs_folder(os.environ)}. These runs then "
        f"waited {duration(lost['queued_s'])} in the queue. `--spare-nodes 1` for each run would have saved up to "
        f"that, and used {node_hours(lost['spare_node_s'])} more"
    )


def rows(checks: Sequence[Check], columns: int | None) -> list[str]:
    """A row per check with its state, its name and what it found. The next line says what to do."""
    width = max((len(check.name) for check in checks), default=0)
    lines = []
    for check in checks:
        head = f"{check.state:7}  {check.name:{width}}  "
        texts = [check.found, *([f"-> {check.advice}"] if check.advice else [])]
        indent = len(head) if columns is None or columns - len(head) >= 30 else 4
        for number, text in enumerate(texts):
            first = head if number == 0 else " " * indent
            if columns is None:
                lines.append(first + text)
            else:
                lines += _wrapped(text, columns, first, " " * indent)
    return lines


def _wrapped(text: str, columns: int, first: str = "", others: str = "") -> list[str]:
    """Wraps a text without breaking paths and commands."""
    return textwrap.wrap(
        text,
        columns,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def list_failed_nodes(given: str, group: bool) -> None:
    """Prints the nodes, those with the newest failure first. ``given``: the folder of runs, or "" for the default."""
    folder, now = Path(given) if given else runs_folder(os.environ), time.time()
    if given and not folder.is_dir():
        raise UsageError(f"--failed-nodes: {folder} is not a folder. Expected the folder with your run directories")
    nodes = by_node(recall(folder / FOLDER, group, now))
    if not nodes:
        show(f"No node failures from the last week are recorded in {folder}.")
        return
    for node, failures in nodes.items():
        runs = counted(len({failure.run for failure in failures}), "run")
        ago = duration(max(0.0, now - failures[0].time))
        avoided = f"new jobs avoid it, {UNLESS}" if is_avoided(failures, now) else "new jobs may use it"
        times = counted(len(failures), "failure")
        put(f"{node}: {times} in {runs}, the last {ago} ago ({failures[0].what}), {avoided}")
    for node, failures in nodes.items():
        if weight(failures, now):
            put(f"\nTo send to the cluster's administrator:\n\n{letter(node, failures, now)}")
