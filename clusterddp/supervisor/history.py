"""Writes a run's history: events.jsonl, a message for each event, and the outcome.

The history is read once, when the attempt starts. No later decision depends on another read.

One process writes it at a time. While a supervisor holds the run (``lease.py``), that is the supervisor: the attempt's
history thread while the ranks run, then the main thread. While no process holds the run, these write a single line:
``submit --fork`` before the run's first job, ``clusterddp cancel`` after it marked the run and its holder ended, and
rank 0 of a script that was started without a supervisor, as by torchrun (``training/context.py``). A superseded
supervisor closes its history before it does anything else. ``History.conclude`` writes the outcome, ``StepLog`` the
steps of a script that only prints them, and ``Hook`` calls the user's command.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from clusterddp import protocol
from clusterddp.history.codec import sentence
from clusterddp.history.words import BY_SLURM, HOOK_EVENTS
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.secrets import masked
from clusterddp.process import ending_alone
from clusterddp.reporter import say
from clusterddp.rundir.files import append_line, create_file, finite, open_binary, write_json
from clusterddp.rundir.records import drop_torn_line
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm.run_states import Cause
from clusterddp.supervisor.attempt_state import RankEvent
from clusterddp.supervisor.limits import attempts_made
from clusterddp.worker.control_channel import clip

#: The most characters of a free text in an event.
_LONGEST_TEXT = 4000


class History:
    """Appends an attempt's events. Events that could not be written are kept, and retried with the next one.

    ``secrets``: values to mask in events. ``printed``: whether their sentences are printed, for the job's log.
    """

    def __init__(self, run: RunDirectory, attempt: int, secrets: Sequence[str] = (), *, printed: bool = True) -> None:
        self._run, self._attempt, self.secrets, self._printed = run, attempt, secrets, printed
        #: Events that could not be written yet.
        self.pending: list[dict[str, Any]] = []
        self._closed = False
        self.newest_step: int | None = None
        self.newest_checkpoint: int | None = None
        #: Gets every event that is added.
        self.listener: Callable[[Mapping[str, Any]], None] = lambda _: None
        drop_torn_line(run.events_file)
        #: All events of the run, oldest first, with those that a full disk has not taken yet.
        self.events = run.events()

    def add(self, event: str, at: float | None = None, /, **values: Any) -> None:
        """Appends one event, unless the history was closed. ``at``: when it happened, in unix seconds. Now if None."""
        line = {
            "time": time.time() if at is None else at,
            "attempt": self._attempt,
            "event": event,
            **self._presentable(values),
        }
        if self._closed:
            return
        self.newest_step = highest([self.newest_step, values.get("step")])
        if event == "checkpoint":
            self.newest_checkpoint = values["step"]
        self.events.append(line)
        self.pending.append(line)
        self._try_to_write()
        self.listener(line)
        if self._printed and (
            words := sentence(line)
        ):  # a local run's terminal shows the events in the file, and our stderr
            print(words, file=sys.stderr if self.pending else sys.stdout, flush=True)

    def _presentable(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Masks secrets in free texts, such as an exception's, and clips them."""
        texts = {name: values[name] for name in ("error", "reason") if isinstance(values.get(name), str)}
        return {**values, **{name: clip(masked(text, self.secrets), _LONGEST_TEXT) for name, text in texts.items()}}

    def write_pending(self) -> None:
        """Writes what could not be written so far. Raises OSError if it still cannot be."""
        while self.pending:
            append_line(self._run.events_file, self.pending[0])
            del self.pending[0]

    def _try_to_write(self) -> None:
        try:
            self.write_pending()
        except OSError as error:
            if len(self.pending) == 1:
                say(f"could not write the history ({error.strerror}). Will retry with the next event")

    def close(self) -> None:
        """Stops writing, also in other threads, because a newer attempt's supervisor writes the file from now on."""
        self._closed = True

    def saved(self) -> dict[str, Any]:
        """The step that this attempt reached (0: none; None: the script records none), and its newest checkpoint."""
        try:
            line = self._run.last_metrics()
        except OSError as error:  # the run continues: only its checkpoints matter
            say(f"could not read the metrics ({error}). The last step is unknown")
            line = None
        done = line["step"] + 1 if line and line["attempt"] == self._attempt else self.newest_checkpoint
        if done is None and self.newest_step is not None:
            done = 0
        return {"step": done, "checkpoint": self.newest_checkpoint}

    def conclude(self, state: str, reason: str, *, confirmed: bool = True, step: int | None = None) -> bool:
        """Writes the outcome, outcome.json: the run is over. Its step is None if the script recorded none.

        It is written by

        - the supervisor, once its ranks have exited, in ``Recovery``: if the verdict is complete, fail or cancel
          (``_act``), if a limit forbids another attempt (``_bounded``), or if the run was cancelled while it was being
          resubmitted (``_hand_over``),
        - a supervisor that starts no ranks, because ``done`` is met or a limit is exceeded (``main.conclude``),
        - ``clusterddp cancel``, once no job or process holds the run, if there is no outcome yet.

        The file has no lock: it is replaced atomically. ``main.supervise_one`` excludes a second writer earlier. A
        supervisor exits if the run is over or another live job holds it (``lease.held_by_other``), and claims its
        attempt by an exclusive ``mkdir``. ``Recovery._act`` exits without writing if a newer attempt exists. A run with
        an outcome continues only on a user's request: the submission, or the attempt that it starts, removes the file.

        ``step``: one that the run has reached, which no event may name. ``confirmed``: false if the run completed only
        by exit code 0, and that is doubtful. Returns whether the outcome was written. An error is reported, and does
        not change how the attempt ended.
        """
        step = highest([step, *(event.get("step") for event in self.events)])
        # No rank reports the last step in its output, and one on a node that does not respond reports none at all.
        if state == "completed" or any("log" in event and event["attempt"] == self._attempt for event in self.events):
            step = highest([step, self.saved()["step"]])
        values = self._presentable({"step": step, "attempts": attempts_made(self.events), "reason": reason})
        if not confirmed:
            values["confirmed"] = False
        self.add(state, **values)
        try:
            write_json(self._run.outcome_file, {"state": state, **values})
        except OSError as error:
            say(f"could not write {self._run.outcome_file} ({error.strerror}). Without it, the run may start again")
            return False
        return True


def highest(steps: Iterable[int | None]) -> int | None:
    """The highest step. None if there is none."""
    return max((step for step in steps if step is not None), default=None)


#: How often the outputs are read, in seconds, and how many bytes of each at a time.
LOOK_S, BLOCK = 1.0, 1 << 20
#: The longest part of a line that is searched, at its end.
LONGEST = 1 << 16


class StepLog:
    """The steps of a script with ``steps: {log: REGEX}``, from what its rank 0 prints, written into metrics.jsonl.

    The supervisor reads the files, because libraries and child processes write the script's output, too. It runs on
    rank 0's node, where it sees new output at once. It writes the newest step at most once a second.

    The number in the output is taken as the number of steps done, whether the script counts from 0 or from 1: commands
    then show the same number as the script. How many steps are repeated is exact if the script prints each of them.

    Reads until it is closed. ``post`` gets the event ``training`` with the first step of the attempt.
    """

    def __init__(self, run: RunDirectory, attempt: int, pattern: str, post: Callable[[RankEvent], None]) -> None:
        self._metrics, self._attempt, self._pattern, self._post = run.metrics_file, attempt, re.compile(pattern), post
        logs = run.attempt_logs(attempt)
        self._outputs = [_Output(logs / f"rank-0.{name}") for name in ("out", "err")]
        self._step: int | None = None
        self._warned = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._read, name="step log", daemon=True)
        self._thread.start()

    @property
    def found(self) -> bool:
        """Whether rank 0 has printed a step."""
        return self._step is not None

    def close(self, read_rest: bool = False) -> None:
        """Ends the thread. ``read_rest``: looks once more, because the ranks have exited."""
        self._end.set()
        self._thread.join(timeout=2 * LOOK_S)
        if read_rest and not self._thread.is_alive():
            self._look()

    def _read(self) -> None:
        while not self._end.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        try:
            steps = [step for output in self._outputs for line in output.lines() for step in self._steps_in(line)]
            for step in steps:
                if self._step is None:
                    self._post(RankEvent(0, "training", {"step": max(0, step - 1), "log": step}))
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
        found = [match[1] for match in self._pattern.finditer(line)]
        digits = (found[-1] or "").replace(",", "").replace("_", "") if found else ""
        return [int(digits)] if digits.isdecimal() and len(digits) <= 18 else []


class _Output:
    """A file that a rank writes."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._rest = path, 0, b""

    def lines(self) -> list[str]:
        """The lines that have been completed since the last call. Progress bars end theirs with a carriage return."""
        found: list[bytes] = []
        try:
            with open_binary(self._path) as file:
                file.seek(self._offset)
                while data := file.read(BLOCK):
                    self._offset += len(data)
                    *complete, self._rest = re.split(rb"[\r\n]+", self._rest + data)
                    self._rest = self._rest[-LONGEST:]
                    found += complete
        except FileNotFoundError:  # not yet, or removed by the script
            return []
        return [line[-LONGEST:].decode(errors="replace") for line in found]


TIMEOUT_S = 10.0
HANDOVER_S = 0.25
_PREEMPTED = (Cause.PREEMPTED.value, Cause.PREEMPTED_WITHOUT_GRACE.value)


def hook_event(event: Mapping[str, Any]) -> str | None:
    """The word of ``HOOK_EVENTS`` for an event of the history. None if the hook is not called for it."""
    name = event["event"]
    if name == "stopped" and event.get("then") != BY_SLURM:
        return "stopped"
    if name in ("requeued", "resubmitted", "stopped"):
        return "preempted" if event.get("cause") in _PREEMPTED else None
    if name == "own_checkpoint_read":
        return "resumed"
    return name if name in HOOK_EVENTS else None


class Hook:
    """Calls the hook of a job, if it has one: the user's command, with an event of the run as JSON on standard input.

    A call never delays the ranks or changes the run: it has a separate thread and session, its output goes to
    ``logs/hook.log``, and a failure is a message. A call is killed after ``TIMEOUT_S``. Before this process exits, it
    waits for running calls as long, but only ``HANDOVER_S`` if a preempting job waits for the nodes. On a preemption
    the hook is therefore called as soon as the controller confirms it, while the ranks save.

    ``hurry``: whether a preempting job waits for this process to exit.
    """

    def __init__(self, run: RunDirectory, job: Job, attempt: int, hurry: bool = False) -> None:
        self._run, self._job, self._attempt, self._hurry = run, job, attempt, hurry
        self._called: set[str] = set()
        self._calls: list[tuple[str, threading.Thread]] = []
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __bool__(self) -> bool:
        return bool(self._job.hook)

    def notify(self, event: Mapping[str, Any]) -> None:
        """Calls the hook if it gets this event of the history."""
        if (word := hook_event(event)) is not None:
            self.call(word, event)

    def call(self, word: str, event: Mapping[str, Any]) -> None:
        """Calls the hook, once for each word of an attempt. Does not wait."""
        if not self._job.hook or word in self._called:
            return
        self._called.add(word)
        values: dict[str, Any] = {**event, "event": word, "run": str(self._run), "job_name": self._job.name}
        thread = threading.Thread(target=self._carry_out, args=(word, values), name=f"hook {word}", daemon=True)
        self._calls.append((word, thread))
        thread.start()

    def finish(self) -> None:
        """Waits briefly for calls, then kills the rest, because Slurm would take seconds to end them."""
        begun = time.monotonic()
        for word, thread in self._calls:
            soon = word == "resumed" or (self._hurry and "preempted" in self._called)
            thread.join(max(0.0, (HANDOVER_S if soon else TIMEOUT_S + 1) - (time.monotonic() - begun)))
            if thread.is_alive() and word in self._processes:
                say(
                    f"killed the hook ({word!r}), because it was still running when this job had to end. "
                    f"Its output is in {self._run.hook_log}"
                )
                _kill(self._processes.pop(word))

    def _carry_out(self, word: str, values: Mapping[str, Any]) -> None:
        names: dict[str, str] = {protocol.RUN_DIR: str(self._run), protocol.ATTEMPT: str(self._attempt)}
        try:
            with open(self._run.hook_log, "ab", opener=create_file) as log:
                process = subprocess.Popen(
                    self._job.hook,
                    env={**os.environ, **names},
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            say(f"could not call the hook for {word!r}: {error.strerror} ({error.filename})")
            return
        self._processes[word] = process
        with ending_alone(process.pid):
            problem = _wait(process, word, (json.dumps(finite(values)) + "\n").encode())
        if problem and self._processes.pop(word, None):  # else `finish` killed it
            say(f"{problem}. Its output is in {self._run.hook_log}")


def _wait(process: subprocess.Popen[bytes], word: str, values: bytes) -> str | None:
    """Waits for a call. Returns the message if it failed."""
    try:
        process.communicate(values, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        _kill(process)
        process.wait()
        return f"hook timed out after {TIMEOUT_S:.0f} s ({word!r})"
    if process.returncode < 0:
        return f"hook was killed by signal {-process.returncode} ({word!r})"
    return f"hook failed with exit code {process.returncode} ({word!r})" if process.returncode else None


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
