"""The process that sends a run's metrics to one tracker, beside the training.

``python -m clusterddp.trackers.follower ARGUMENTS``, a JSON object. Rank 0 starts it, and sends the step of each
committed checkpoint on standard input, one per line, and at last ``complete``, ``end`` or ``error``. A problem is one
line on standard output. The output of the tracker's package goes to standard error. The metrics come from
``metrics.jsonl``, the truth about what counts, so that values survive if this process is killed: the next attempt
begins with those that the tracker lacks.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import select
import sys
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from clusterddp.errors import RunDirectoryError, Superseded
from clusterddp.process import die_with_parent
from clusterddp.reporter import in_words
from clusterddp.rundir.files import create_file, create_folder
from clusterddp.rundir.metrics_lines import counts
from clusterddp.rundir.ownership import hold_run
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.schemas import NOT_METRICS
from clusterddp.trackers.delivery import Line, Lines, Sent, read_sent, write_sent
from clusterddp.trackers.registry import TRACKERS
from clusterddp.trackers.tracker import Sender, Tracker

#: Seconds between two looks for new lines, for a tracker that takes them at once.
PERIOD_S = 1.0


class Follower:
    """Sends one tracker each line that counts, once."""

    def __init__(self, run: RunDirectory, attempt: int, folder: Path, sender: Sender, live: bool) -> None:
        self._run, self._attempt, self._folder, self._sender, self._live = run, attempt, folder, sender, live
        self._lines = Lines(run.metrics_file, counts(run.first_steps()), sender.first)
        self._committed = -1

    def send(self, committed: int, rest: bool = False) -> None:
        """Sends new lines: those below a checkpoint, or all if the tracker is live, or for the ``rest``.

        Raises Superseded.
        """
        more = committed > self._committed
        if more:
            self._check_newest()
        self._committed = committed
        for line in self._lines.below(math.inf if self._live or rest else committed):
            self._add(line)
        sent = self._sender.flush(committed if more else None)
        if more:
            write_sent(self._folder, sent)

    def close(self, clean: bool) -> None:
        """Ends the connection. Raises Superseded."""
        self._check_newest()
        write_sent(self._folder, self._sender.close(self._committed, clean))

    def _add(self, line: Line) -> None:
        values = {
            name: value for name, value in line.items() if name not in NOT_METRICS and isinstance(value, (int, float))
        }
        if values:
            self._sender.add(line["step"], float(line.get("time", 0.0)), values)

    def _check_newest(self) -> None:
        if self._run.superseded(self._attempt):
            raise Superseded


class Orders:
    """The orders of rank 0. They end when it exits."""

    def __init__(self, committed: int) -> None:
        self.committed = committed
        #: Whether no more lines follow, the script has not failed, and no attempt follows.
        self.ended = self.clean = self.complete = False
        self._rest = b""

    def wait(self, seconds: float | None) -> None:
        """Waits for an order, at most this many seconds."""
        if not select.select([0], [], [], seconds)[0]:
            return
        said = os.read(0, 1 << 16)
        *lines, self._rest = (self._rest + said).split(b"\n")
        for line in lines:
            if line.isdigit():
                self.committed = int(line)
            else:
                self.ended, self.clean, self.complete = True, line != b"error", line == b"complete"
        self.ended |= not said


def main() -> int:
    """Serves rank 0 until the attempt ends."""
    die_with_parent()
    given = json.loads(sys.argv[1])
    out, sys.stdout = sys.stdout, sys.stderr  # a package may print
    orders = Orders(given["committed"])
    try:
        run = RunDirectory(given["run"])
        hold_run(run, given["inode"], given["attempt"])
        follow(given["tracker"], run, given["attempt"], given["options"], orders, out)
    except Superseded:
        return 0
    except Exception as error:
        traceback.print_exc()
        print(f"gets no more values in this attempt: {in_words(error)}", file=out, flush=True)
        return 1
    return 0


def follow(name: str, run: RunDirectory, attempt: int, options: Mapping[str, Any], orders: Orders, out: TextIO) -> None:
    """Sends until the orders end. Writes messages for the user to ``out``. Raises the tracker's errors, which it also
    records for ``status``, and Superseded."""
    tracker, folder = TRACKERS[name], run.path / name
    try:
        create_folder(folder, exist_ok=True)
        with open(folder / "lock", "ab", opener=create_file) as lock:
            _lock(lock.fileno())
            sender = _opened(tracker, run, folder, attempt, options, out)
            follower = Follower(run, attempt, folder, sender, tracker.live)
            follower.send(orders.committed)
            while not orders.ended:
                orders.wait(PERIOD_S if tracker.live else None)
                follower.send(orders.committed)
            follower.send(orders.committed, rest=orders.complete)
            follower.close(orders.clean)
    except Superseded:
        raise
    except Exception as error:
        _record_problem(folder, in_words(error))
        raise


def _opened(
    tracker: Tracker, run: RunDirectory, folder: Path, attempt: int, options: Mapping[str, Any], out: TextIO
) -> Sender:
    earlier = read_sent(folder) or Sent()
    first = earlier.lacks_from(run.first_steps())
    sent = replace(earlier, problem=None, attempt=attempt)
    if tracker.live:
        sent = replace(sent, step=first)
    elif first < sent.step:
        steps = f"{first} to {sent.step - 1}"
        print(f"keeps an earlier attempt's values of steps {steps}, which are now repeated", file=out, flush=True)
    return tracker.open(folder, sent, options)


def _lock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunDirectoryError("another process of this run is already sending to this tracker") from None


def _record_problem(folder: Path, words: str) -> None:
    """For ``status``."""
    try:
        write_sent(folder, replace(read_sent(folder) or Sent(), problem=words))
    except (OSError, RunDirectoryError):
        traceback.print_exc()


if __name__ == "__main__":
    sys.exit(main())
