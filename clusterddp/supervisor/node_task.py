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
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from clusterddp.codec import read
from clusterddp.process import descendants
from clusterddp.reporter import duration, printable
from clusterddp.staging import NotStaged, Packed, unpack

#: slurmstepd passes lines of at most 1,024 bytes on as they are. A report has a line, with this many characters of the
#: output, each of which may take six bytes.
LONGEST_OUTPUT = 120
#: The same for the reason why there is no copy, which has few characters that need six bytes.
LONGEST_REASON = 500


@dataclass(frozen=True)
class Plan:
    """What each node does. ``seconds``: how long it may take. ``stage``: the folder for a copy of ``packed``."""

    lines: Sequence[str]
    seconds: float
    stage: str = ""
    packed: Packed | None = None


@dataclass(frozen=True)
class NodeReport:
    """What a node answers. ``failed``: why no rank may start there, or None. ``output``: the start of its last line.
    ``not_staged``: why it cannot have a copy of the environment, or None. ``unpacked``: whether it has just got it."""

    node: str
    failed: str | None = None
    output: str = ""
    not_staged: str | None = None
    unpacked: bool = False


def set_up(plan: Plan, node: str) -> NodeReport:
    """Runs the plan's shell lines on this node. What they print goes to standard error, each line with the node's
    name."""
    if not plan.lines:
        return NodeReport(node)
    with os.fdopen(os.memfd_create("node_setup"), "w+b") as output:  # a pipe would wait for processes that stay behind
        failed = _run(plan.lines, output.fileno(), plan.seconds)
        output.seek(0)
        said = [printable(line) for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    sys.stderr.write("".join(f"{node}: {line}\n" for line in said))
    return NodeReport(node, failed, said[-1][:LONGEST_OUTPUT] if said and failed else "")


def stage(plan: Plan, packed: Packed, node: str, seconds: float) -> NodeReport:
    """Makes sure that this node has a complete copy of the environment."""

    def end(*_: object) -> None:
        raise NotStaged(f"copying {packed.prefix} did not end within {duration(plan.seconds)} (timeouts.nodes_s)")

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, max(1.0, seconds))
    try:
        return NodeReport(node, unpacked=unpack(packed, Path(plan.stage), node)[1])
    except NotStaged as error:
        return NodeReport(node, not_staged=str(error)[:LONGEST_REASON])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


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
    """Sets this node up: first what the lines say, which may create the folder for the copy."""
    plan, node, began = read(Plan, json.load(sys.stdin)), os.environ["SLURMD_NODENAME"], time.monotonic()
    report = set_up(plan, node)
    if report.failed is None and plan.packed is not None:
        report = stage(plan, plan.packed, node, plan.seconds - (time.monotonic() - began))
    sys.stdout.write(f"{json.dumps(asdict(report))}\n")  # at once: with python -u, print() writes a line end apart


if __name__ == "__main__":
    main()
