"""Rank 0's side of the trackers: a process for each, ``trackers/follower.py``, which cannot delay or stop training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from clusterddp.jobdef.job import Job
from clusterddp.process import module_command
from clusterddp.reporter import say
from clusterddp.rundir.files import create_file
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.trackers.sent import NAMES, wanted
from clusterddp.worker import signals

#: Seconds that trackers may take for the rest, once the script has ended: after all steps, at a stop, after an error.
#: The next attempt sends what they lack then.
DONE_S, STOP_S, ERROR_S = 20.0, 3.0, 1.0
#: Variables that belong to a W&B or MLflow run of the script's own.
_OF_SCRIPT = ("WANDB_SERVICE", "WANDB_RUN_ID", "WANDB_RESUME", "MLFLOW_RUN_ID")


class Tracking:
    """The trackers of a run. Its methods have no effect on ranks other than 0 and without a run directory."""

    def __init__(self, directory: RunDirectory | None, job: Job, attempt: int, report: Callable[..., None]) -> None:
        self._directory, self._job, self._attempt, self._report = directory, job, attempt, report
        self._processes: list[_Process] = []

    def begin(self, committed: int) -> None:
        """Starts the processes. ``committed``: the checkpoint that the attempt resumed from, or 0."""
        if self._directory is None:
            return
        for tracker, options in wanted(self._job, self._directory.path.name, os.environ).items():
            given = {"tracker": tracker, "run": str(self._directory), "attempt": self._attempt}
            given |= {"committed": committed, "options": options}
            log = self._directory.attempt_logs(self._attempt) / f"{tracker}.err"
            try:
                self._processes.append(_Process(given, log, self._report))
            except OSError as error:
                self._report("tracker", tracker=NAMES[tracker], problem=f"gets no values in this attempt: {error}")

    def committed(self, step: int) -> None:
        """A checkpoint is committed. Any thread. Never waits."""
        for process in self._processes:
            process.tell(str(step))

    def end(self, clean: bool) -> None:
        """No more lines follow."""
        for process in self._processes:
            process.tell("end" if clean else "error")

    def close(self, seconds: float, complete: bool = False) -> None:
        """Waits until the trackers have all that they can get, at most this many seconds, then ends them.

        ``complete``: whether no attempt follows.
        """
        until = time.monotonic() + seconds
        then = f"To send the rest, run `python -m clusterddp.trackers {self._directory}`" if complete else None
        for process in self._processes:
            process.close(until, then)
        self._processes.clear()


class _Process:
    """The process of one tracker."""

    def __init__(self, given: Mapping[str, Any], log: Any, report: Callable[..., None]) -> None:
        self._tracker, self._report = NAMES[given["tracker"]], report
        command = [*module_command("clusterddp.trackers.follower"), json.dumps(given)]
        environ = {name: value for name, value in os.environ.items() if name not in _OF_SCRIPT}
        with open(log, "ab", opener=create_file) as errors, signals.blocked():
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environ,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._reading = threading.Thread(target=self._read, name="tracker", daemon=True)
        self._reading.start()

    def tell(self, order: str) -> None:
        """Sends an order, which is dropped if the pipe is full, because the process then hangs."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):
            os.write(self._process.stdin.fileno(), f"{order}\n".encode())

    def close(self, until: float, then: str | None) -> None:
        """Ends the process at that time, with those that it has started. ``then``: how it gets the rest, unless from
        the next attempt."""
        try:
            self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            problem = f"did not receive all values in time. {then or 'The next attempt sends the rest'}"
            say(f"{self._tracker} {problem}")
            if then is not None:
                self._report("tracker", tracker=self._tracker, problem=problem)
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._reading.join(1.0)
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as said:
            for line in said:
                self._report("tracker", tracker=self._tracker, problem=line.decode(errors="replace").strip())
