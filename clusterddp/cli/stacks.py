"""``clusterddp stacks``: where the ranks are now, as Python stacks, equal ones together."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from clusterddp.errors import FAILED, RunDirectoryError, UsageError
from clusterddp.failures.stack_traces import NAMED, described, summary
from clusterddp.hostlist import ranges, ranks_in
from clusterddp.reporter import counted, put
from clusterddp.rundir.run_directory import ONE_RUN, open_run
from clusterddp.runs.requests import request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``stacks``."""
    parser.add_argument("run", metavar="RUN", help=ONE_RUN)
    parser.add_argument("--rank", default="all", metavar="R", help="ranks such as 0,3-5 (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace, _: object) -> int:
    """Prints the stacks. The exit code is 1 if no rank has answered."""
    ranks = arguments.rank
    if ranks != "all":
        try:
            ranks_in(ranks)
        except ValueError as error:
            raise UsageError(f"--rank {ranks}: {error}, or all") from error
    run = open_run(arguments.run)
    _, answer = request(run, "stacks", ranks=None if ranks == "all" else ranks)
    if not answer:
        raise RunDirectoryError(
            f"the supervisor of {run} has exited. See the run's state with: clusterddp status {run.quoted}"
        )
    if arguments.json:
        print(json.dumps(answer))
    else:
        put(text(answer))
    return 0 if answer["stacks"] else FAILED


def text(answer: Mapping[str, Any]) -> str:
    """A summary, each group of equal stacks, and the ranks without an answer."""
    lines = [summary(answer["stacks"])]
    for group in answer["stacks"]:
        lines += ["", *described(group)]
    missing = []
    if silent := answer["unanswered"]:
        shown = [f"{rank} ({answer['hosts'].get(str(rank), 'unknown')})" for rank in silent[:NAMED]]
        more = f" and {len(silent) - NAMED} more" if len(silent) > NAMED else ""
        missing.append(
            f"{counted(len(silent), 'rank')} did not answer: {', '.join(shown)}{more}. A rank cannot answer while it "
            "is stopped, or in C code that holds Python's GIL"
        )
    if starting := answer["starting"]:
        missing.append(f"still starting: {ranges(starting)}")
    if exited := answer["exited"]:
        missing.append(f"exited: {ranges(exited)}")
    return "\n".join([*lines, *(["", *missing] if missing else [])])
