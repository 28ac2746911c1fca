"""The run's metrics: one JSON line per completed step, written by rank 0.

Values of GPUs and of other ranks arrive later than their step. Its line waits for them, and the following lines wait
behind it. Complete lines are written at the next end of a step, or by the thread that collects the ranks' values
(``log_reduction.py``). All lines below a checkpoint are written before it is committed.

``Tracking`` is rank 0's side of the trackers: a process for each (``trackers/follower.py``), which cannot delay or stop
training.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from clusterddp.history.event import Reported
from clusterddp.history.steps import NotFinite, Tracker
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.tracking import wanted
from clusterddp.process import module_command
from clusterddp.reporter import counted, say
from clusterddp.rundir.files import create_file, finite, fsync_directory, read_bytes, status, write_atomically
from clusterddp.rundir.json_lines import drop_torn_line
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.trackers.registry import TRACKERS
from clusterddp.training.log_reduction import Receiver, reduce_values
from clusterddp.training.logged_values import Logged
from clusterddp.worker import signals

#: The most metrics that an event lists as not finite.
_MOST_NAMES = 20
#: Seconds for which a line waits for other ranks once it is needed: for a save beside the training, while training
#: waits, and after an error, when ranks may have exited.
BESIDE_S, WAIT_S, AFTER_ERROR_S = 60.0, 10.0, 0.5
_encode = json.JSONEncoder(allow_nan=False).encode
_quoted = lru_cache(10_000)(_encode)


@dataclass(slots=True)
class _Line:
    step: int
    time: float
    logged: Logged
    #: Whether the script logged it outside a step.
    outside: bool = False


class Metrics:
    """Appends to ``metrics.jsonl``. Each line is written once its values are there. The checkpoint writer makes them
    durable.

    A full disk does not stop training. The lines are kept, and written as soon as there is space again.
    """

    #: The most steps whose lines wait for values; with more, training waits for the oldest.
    most_pending = 1000

    def __init__(self, path: Path, attempt: int, report: Callable[[Reported], None]) -> None:
        drop_torn_line(path)
        self._path, self._attempt, self._report = path, attempt, report
        self._file = self._open()
        if os.fstat(self._file).st_size == 0:
            fsync_directory(path.parent)
        #: Collects the values of other ranks, if there are any.
        self.receiver: Receiver | None = None
        self._pending: deque[_Line] = deque()
        #: Of these lines, the values that the training thread has not seen arrive, oldest first.
        self._on_gpus: deque[Logged] = deque()
        #: Held while lines are completed and written, by any thread.
        self._lock = threading.RLock()
        #: The values of the newest line that is complete.
        self.newest: dict[str, Any] = {}
        self._unwritten = b""
        self._failing = False
        #: Set when fsync failed: the kernel marks lost pages as clean, so that a second fsync would not report them.
        #: All lines go into a new file.
        self.doubtful = False
        self._not_finite: set[str] = set()

    def add(self, step: int, logged: Logged, outside: bool = False) -> None:
        """Takes the values of a completed step, or those logged ``outside`` one. For the training thread."""
        if self.receiver is not None and logged.reduced:
            self.receiver.expect(step)
        line = _Line(step, time.time(), logged, outside)
        self._pending.append(line)
        if logged.copied:
            self._on_gpus.append(logged)
        if self._on_gpus:
            self.take_arrived()
        if len(self._pending) > self.most_pending:
            self.settle(self._pending[0].step + 1, WAIT_S)
        elif not self._awaits_ranks(line):  # otherwise the receiver's thread writes it, with those before it
            self.drain()

    def take_arrived(self) -> None:
        """Takes the values that have arrived from GPUs. For the training thread, or for a different one while it
        hangs."""
        with self._lock:
            while self._on_gpus and self._on_gpus[0].arrived():
                self._on_gpus.popleft()

    @property
    def pending(self) -> bool:
        """Whether lines wait for values."""
        return bool(self._pending)

    def settle(self, step: int, seconds: float) -> None:
        """Completes and writes the lines of all steps below ``step``. Any thread.

        Waits for GPUs, and for other ranks at most so many seconds.
        """
        lines = list(self._pending)  # in one go, because the training thread appends without the lock
        reduced = [line.step for line in lines if line.step < step and line.logged.reduced]
        if reduced and self.receiver is not None:
            self.receiver.wait(reduced[-1], seconds)
        self.drain(below=step)

    def drain(self, below: int = 0) -> None:
        """Writes the lines whose values have arrived, and waits for the GPUs' values of steps below ``below``. Any
        thread."""
        with self._lock:
            last = None
            try:
                while self._pending and self._is_complete(self._pending[0], below):
                    self._complete(self._pending[0])
                    last = self._pending.popleft()
            finally:  # also if a GPU fails
                if last is not None:
                    self._try_flush(last.step)

    def _try_flush(self, step: int) -> None:
        try:
            self.flush()
            self._failing = False
        except OSError as error:
            if not self._failing:
                say(f"could not write metrics for step {step}: {error.strerror}. Will retry")
            self._failing = True

    def flush(self) -> None:
        """Writes the lines that a full disk held back. Raises OSError if that fails."""
        with self._lock:
            if self.doubtful:
                write_atomically(self._path, read_bytes(self._path))
                doubtful, self._file = self._file, self._open()
                self.doubtful = False
                os.close(doubtful)
            while self._unwritten:
                written = os.write(self._file, self._unwritten)
                self._unwritten = self._unwritten[written:]

    def close(self, clean: bool = True) -> None:
        """Writes the rest. Not ``clean``, after an error: without waiting for other ranks."""
        try:
            self.settle(self._pending[-1].step + 1 if self._pending else 0, WAIT_S if clean else AFTER_ERROR_S)
        except RuntimeError as error:  # of CUDA, which the script also gets
            steps = counted(len(self._pending), "step")
            say(f"could not write the metrics of the last {steps}: {str(error).splitlines()[0]}")
        if self.receiver is not None:
            self.receiver.close()
        with suppress(OSError):  # a network file system may report a failed write here; the last save has synced
            os.close(self._file)
        self._file = -1

    def _is_complete(self, line: _Line, below: int) -> bool:
        return not self._awaits_ranks(line) and (line.step < below or not line.logged.copied)

    def _awaits_ranks(self, line: _Line) -> bool:
        return bool(line.logged.reduced) and self.receiver is not None and not self.receiver.has(line.step)

    def _complete(self, line: _Line) -> None:
        """Adds the line to those to write. The first time that a metric is not finite is recorded in the history."""
        values = line.logged.numbers()
        if line.logged.reduced:
            values = self._reduced(line, values)
        begin = f'{{"step": {line.step}, "time": {line.time!r}, "attempt": {self._attempt}'
        if line.outside:
            begin += ', "event": "result"'
        try:
            text = _members(values)
        except ValueError:  # NaN or infinity
            values = {name: finite(value) for name, value in values.items()}
            text = _members(values)
            self._report_not_finite(line.step, {name: text for name, text in values.items() if isinstance(text, str)})
        self._unwritten += f"{begin}{text}}}\n".encode()
        self.newest = values

    def _report_not_finite(self, step: int, texts: dict[str, str]) -> None:
        if new := [name for name in texts if name not in self._not_finite]:
            self._not_finite.update(new)
            named = {name: texts[name] for name in new[:_MOST_NAMES]}
            self._report(NotFinite(step=step, metrics=named, count=len(new)))

    def _reduced(self, line: _Line, values: dict[str, Any]) -> dict[str, Any]:
        if self.receiver is not None:
            return self.receiver.combined(line.step, values, line.logged.reduced)
        own = {name: reduce_values(how, [float(values[name])]) for name, how in line.logged.reduced.items()}
        return {**values, **own}

    def _open(self) -> int:
        return create_file(self._path, os.O_WRONLY | os.O_APPEND)


def _members(values: Mapping[str, Any]) -> str:
    """The values as the rest of a JSON object. ValueError for NaN and infinity.

    In a step's cold caches, json takes twice as long for a few floats.
    """
    text = ""
    for name, value in values.items():
        if type(value) is float and value - value == 0:
            text += f", {_quoted(name)}: {value!r}"
        else:
            text += f", {_quoted(name)}: {_encode(value)}"
    return text


#: Seconds that trackers may take for the rest, once the script has ended: after all steps, at a stop, after an error.
#: The next attempt sends what they lack then.
DONE_S, STOP_S, ERROR_S = 20.0, 3.0, 1.0


class Tracking:
    """The trackers of a run. Its methods have no effect on ranks other than 0 and without a run directory."""

    def __init__(
        self, directory: RunDirectory | None, job: Job, attempt: int, report: Callable[[Reported], None]
    ) -> None:
        self._directory, self._job, self._attempt, self._report = directory, job, attempt, report
        self._processes: list[_Process] = []

    def begin(self, committed: int) -> None:
        """Starts the processes. ``committed``: the checkpoint that the attempt resumed from, or 0."""
        if self._directory is None:
            return
        for tracker, options in wanted(self._job, self._directory.path.name, os.environ).items():
            given = {"tracker": tracker, "run": str(self._directory), "attempt": self._attempt}
            inode = status(self._directory.path).st_ino
            given |= {"inode": inode, "committed": committed, "options": options}
            log = self._directory.attempt_logs(self._attempt) / f"{tracker}.err"
            try:
                self._processes.append(_Process(given, log, self._report))
            except OSError as error:
                self._report(
                    Tracker(tracker=TRACKERS[tracker].name, problem=f"gets no values in this attempt: {error}")
                )

    def committed(self, step: int) -> None:
        """A checkpoint is committed. Any thread. Never waits."""
        for process in self._processes:
            process.tell(str(step))

    def end(self, clean: bool, complete: bool) -> None:
        """No more lines follow. ``complete``: whether no attempt follows either."""
        for process in self._processes:
            process.tell("complete" if complete else "end" if clean else "error")

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

    def __init__(self, given: Mapping[str, Any], log: Any, report: Callable[[Reported], None]) -> None:
        self._tracker, self._report = TRACKERS[given["tracker"]].name, report
        command = [*module_command("clusterddp.trackers.follower"), json.dumps(given)]
        of_script = {name for tracker in TRACKERS.values() for name in tracker.variables_of_script}
        environ = {name: value for name, value in os.environ.items() if name not in of_script}
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
                self._report(Tracker(tracker=self._tracker, problem=problem))
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
                self._report(Tracker(tracker=self._tracker, problem=line.decode(errors="replace").strip()))
