"""The setup of one node before the ranks of a job start: ``python -m clusterddp.supervisor.node_task``.

It reads the plan from standard input, and prints one line of JSON. It imports little, as every node reads that from the
shared disk.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from clusterddp.codec import read
from clusterddp.process import descendants
from clusterddp.reporter import duration, printable

#: slurmstepd passes lines of at most 1,024 bytes on as they are. A report has a line, with this many characters of the
#: output, each of which may take six bytes.
LONGEST_OUTPUT = 120


@dataclass(frozen=True)
class Plan:
    """What each node does. ``seconds``: how long it may take."""

    lines: Sequence[str]
    seconds: float


@dataclass(frozen=True)
class NodeReport:
    """What a node answers. ``failed``: why no rank may start there, or None. ``output``: the end of its last line."""

    node: str
    failed: str | None = None
    output: str = ""


def set_up(plan: Plan, node: str) -> NodeReport:
    """Carries out the plan on this node. What the lines print goes to standard error, each line with the node's
    name."""
    with os.fdopen(os.memfd_create("node_setup"), "w+b") as output:  # a pipe would wait for processes that stay behind
        failed = _run(plan.lines, output.fileno(), plan.seconds)
        output.seek(0)
        said = [printable(line) for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    sys.stderr.write("".join(f"{node}: {line}\n" for line in said))
    return NodeReport(node, failed, said[-1][:LONGEST_OUTPUT] if said and failed else "")


def _run(lines: Sequence[str], output: int, seconds: float) -> str | None:
    """Runs shell lines. Returns how they failed."""
    null = subprocess.DEVNULL
    process = subprocess.Popen(["bash", "-e", "-c", "\n".join(lines)], stdin=null, stdout=output, stderr=output)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        for pid in (*descendants(os.getpid()), process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # one in a driver or a file system outlives that
            process.wait(1.0)
        return f"did not end within {duration(seconds)} (timeouts.nodes_s)"
    if code < 0:
        return f"was killed by signal {-code}"
    return f"exited with code {code}" if code else None


def main() -> None:
    """Sets this node up."""
    plan = read(Plan, json.load(sys.stdin))
    report = json.dumps(asdict(set_up(plan, os.environ["SLURMD_NODENAME"])))
    sys.stdout.write(f"{report}\n")  # at once: Python -u writes what print() gets and its line end apart


if __name__ == "__main__":
    main()
