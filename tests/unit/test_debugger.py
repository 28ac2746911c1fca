"""``breakpoint()`` in a rank without a terminal, and the client that attaches to it from a terminal of its node."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from clusterddp.rundir.run_directory import RunDirectory
from tests.terminal import Terminal

RANK = """
import sys, time
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.worker import debugger
debugger.install(RunDirectory(sys.argv[1]), 0, 1)
x = 41
breakpoint()
print("x is", x, flush=True)
while x < 50:
    time.sleep(0.01)
print("the end", x, flush=True)
"""


@contextmanager
def attached(run: RunDirectory) -> Iterator[Terminal]:
    command = [sys.executable, "-m", "clusterddp.worker.debugger", str(run), "0", "1"]
    terminal = Terminal(partial(subprocess.Popen, command))
    try:
        yield terminal
    finally:
        terminal.end()


def test_a_rank_waits_in_breakpoint_for_any_number_of_terminals(tmp_path: Path) -> None:
    """One detaches at the prompt, the next one changes a variable, continues, and stops the running rank by Ctrl-C."""
    run = RunDirectory(tmp_path)
    rank = subprocess.Popen([sys.executable, "-c", RANK, str(run)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        with attached(run) as terminal:
            terminal.wait_for("(Pdb) ")
            terminal.type("x + 1\n")
            terminal.wait_for("42\r\n(Pdb) ")
            terminal.type("\x04")
            terminal.wait_for("detached. Rank 1 will wait")
        with attached(run) as terminal:
            terminal.wait_for("(Pdb) ")
            terminal.type("!x = 43\n")
            terminal.wait_for("(Pdb) ")
            terminal.type("c\n")
            assert rank.stdout is not None and rank.stdout.readline() == b"x is 43\n"
            terminal.type("\x03")
            terminal.wait_for("(Pdb) ")
            terminal.type("!x = 50\n")
            terminal.wait_for("(Pdb) ")
            terminal.type("c\n")
            terminal.wait_for("rank 1 has exited")
            assert terminal.process.wait() == 0
        out, said = rank.communicate(timeout=30)
        assert out == b"the end 50\n"
        assert f"Attach with: clusterddp shell {run} --rank 1 --attach".encode() in said
    finally:
        rank.kill()
        rank.wait()
