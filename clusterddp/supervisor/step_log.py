"""Reads the steps of a script that only prints them (``steps: {log: REGEX}``), and writes them into metrics.jsonl."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

from clusterddp.history.beginnings import Training
from clusterddp.reporter import say
from clusterddp.rundir.files import append_line
from clusterddp.rundir.growing_file import GrowingFile
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.supervisor.attempt_state import RankEvent

#: The longest part of a line that is searched, at its end.
LONGEST = 1 << 16
#: The fields of the event, as in a line that a rank has sent.
_ORDER = ("time", "attempt", "event", "rank", "step", "log")


class StepLog:
    """The steps of a script with ``steps: {log: REGEX}``, from what its rank 0 prints, written into metrics.jsonl.

    The supervisor reads the files, because libraries and child processes write the script's output, too. It runs on
    rank 0's node, where it sees new output at once. It writes the newest step at most once a second.

    The number in the output is taken as the number of steps done, whether the script counts from 0 or from 1: commands
    then show the same number as the script. How many steps are repeated is exact if the script prints each of them.

    Reads until it is closed. ``post`` gets the event ``training`` with the first step of the attempt.
    """

    #: Seconds between two reads of the outputs.
    read_interval_s = 1.0

    def __init__(self, run: RunDirectory, attempt: int, pattern: str, post: Callable[[RankEvent], None]) -> None:
        self._metrics, self._attempt, self._pattern, self._post = run.metrics_file, attempt, re.compile(pattern), post
        logs = run.attempt_logs(attempt)
        self._outputs = [GrowingFile(logs / f"rank-0.{name}", ends=rb"[\r\n]+") for name in ("out", "err")]
        self._step: int | None = None
        self._warned = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._read, name="step log", daemon=True)
        self._thread.start()

    @property
    def has_matched(self) -> bool:
        """Whether rank 0 has printed a step."""
        return self._step is not None

    def close(self, read_rest: bool = False) -> None:
        """Ends the thread. ``read_rest``: looks once more, because the ranks have exited."""
        self._end.set()
        self._thread.join(timeout=2 * self.read_interval_s)
        if read_rest and not self._thread.is_alive():
            self.look()

    def _read(self) -> None:
        while not self._end.wait(self.read_interval_s):
            self.look()

    def look(self) -> None:
        """Writes the newest step that was printed since the last look."""
        try:
            steps = [step for output in self._outputs for line in output.lines() for step in self._steps_in(line)]
            for step in steps:
                if self._step is None:
                    self._post(RankEvent(0, Training(rank=0, step=max(0, step - 1), log=step, order=_ORDER)))
                elif step < self._step and not self._warned:
                    self._warned = True
                    say(
                        f"the step in rank 0's output went back from {self._step} to {step}. Smaller numbers are "
                        "ignored. Make `steps: {log: ...}` match a number that grows over the whole run"
                    )
                self._step = max(step, self._step or 0)
            if self._step and self._step in steps:
                line = {"step": self._step - 1, "time": time.time(), "attempt": self._attempt}
                append_line(self._metrics, line)
        except OSError as error:
            say(f"could not follow the steps in rank 0's output ({error})")

    def _steps_in(self, line: str) -> list[int]:
        """The last step in a line, as a list. Empty if there is none."""
        found = [match[1] for match in self._pattern.finditer(line[-LONGEST:])]
        digits = (found[-1] or "").replace(",", "").replace("_", "") if found else ""
        return [int(digits)] if digits.isdecimal() and len(digits) <= 18 else []
