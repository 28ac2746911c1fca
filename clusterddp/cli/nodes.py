"""``clusterddp nodes``: the nodes on which runs failed, and a message for the cluster's administrator."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from clusterddp.errors import UsageError
from clusterddp.failures.node_memory import FOLDER, by_node, is_avoided, letter, recall, weight
from clusterddp.reporter import counted, duration, put, show
from clusterddp.rundir.run_directory import runs_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``nodes``."""
    parser.add_argument(
        "folder", nargs="?", type=Path, metavar="FOLDER",
        help="the folder of runs (default: $CLUSTERDDP_RUNS, else ./runs)",
    )  # fmt: skip
    parser.add_argument(
        "--group", action="store_true", help="also count failures that other members of the folder's group recorded"
    )


def run(arguments: argparse.Namespace, _: object) -> int:
    """Prints the nodes, those with the newest failure first."""
    folder, now = arguments.folder or runs_folder(os.environ), time.time()
    if arguments.folder and not folder.is_dir():
        raise UsageError(f"nodes: {folder} is not a folder. Expected the folder that holds your run directories")
    nodes = by_node(recall(folder / FOLDER, arguments.group, now))
    if not nodes:
        show(f"No node failures from the last week are recorded in {folder}.")
        return 0
    for node, failures in nodes.items():
        runs = counted(len({failure.run for failure in failures}), "run")
        ago = duration(max(0.0, now - failures[0].time))
        avoided = "new jobs avoid it" if is_avoided(failures, now) else "new jobs may use it"
        times = counted(len(failures), "failure")
        put(f"{node}: {times} in {runs}, the last {ago} ago ({failures[0].what}), {avoided}")
    for node, failures in nodes.items():
        if weight(failures, now):
            put(f"\nTo send to the cluster's administrator:\n\n{letter(node, failures)}")
    return 0
