"""``python -m tests.commands``: runs many commands of clusterddp, each in a process of its own.

The processes are forked from one that has imported all commands, so that a test can afford hundreds. Standard input is
a JSON list of commands, each a list of words; one whose last word is ``^C`` is interrupted if it still runs after a
while. Standard output is a JSON list of ``Result``. A command that does not end is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, NoReturn

from clusterddp.cli.command_line import parser
from clusterddp.cli.main import main
from tests.cluster import Cluster

INTERRUPT = "^C"
AT_ONCE = 6
#: Seconds until a command is interrupted, or killed.
INTERRUPT_S, HANGS_S = 2.0, 60.0
#: The code of a command that was killed.
HUNG = -9


@dataclass(frozen=True)
class Result:
    """What a command printed, and its exit code."""

    code: int
    stdout: str
    stderr: str


def run_commands(cluster: Cluster, commands: Sequence[Sequence[str]], folder: Path) -> list[Result]:
    """Runs commands of clusterddp as the cluster's user in a folder."""
    variables = {"PYTHONPATH": str(cluster.source), "CLUSTERDDP_RUNS": str(folder), "NO_COLOR": "1", "COLUMNS": "60"}
    command = [cluster.python, "-m", "tests.commands"]
    done = cluster.run(command, input=json.dumps(commands), cwd=folder, env=variables, timeout=240)
    return [Result(**result) for result in json.loads(done.stdout)]


@dataclass
class _Child:
    """A command that runs."""

    words: Sequence[str]
    pid: int = 0
    stdout: IO[bytes] = field(default_factory=tempfile.TemporaryFile)
    stderr: IO[bytes] = field(default_factory=tempfile.TemporaryFile)
    since: float = field(default_factory=time.monotonic)
    interrupted: bool = False

    def start(self) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(self.stdout.fileno(), 1)
            os.dup2(self.stderr.fileno(), 2)
            _run([word for word in self.words if word != INTERRUPT])

    def look(self) -> Result | None:
        """The result once it has ended."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            return Result(os.waitstatus_to_exitcode(status), _text(self.stdout), _text(self.stderr))
        age = time.monotonic() - self.since
        if INTERRUPT in self.words and age > INTERRUPT_S and not self.interrupted:
            os.kill(self.pid, signal.SIGINT)
            self.interrupted = True
        if age > HANGS_S:
            os.kill(self.pid, signal.SIGKILL)
        return None


def _run(words: list[str]) -> NoReturn:
    code = 1
    try:
        main(words)
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else 1
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="backslashreplace")


def _run_all(commands: Sequence[Sequence[str]]) -> list[Result]:
    waiting, running, results = list(enumerate(commands)), dict[int, _Child](), dict[int, Result]()
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            number, words = waiting.pop(0)
            running[number] = _Child(words)
            running[number].start()
        for number, child in list(running.items()):
            if (result := child.look()) is not None:
                results[number] = result
                del running[number]
        time.sleep(0.01)
    return [results[number] for number in sorted(results)]


if __name__ == "__main__":
    parser()  # imports all commands
    print(json.dumps([asdict(result) for result in _run_all(json.load(sys.stdin))]))
