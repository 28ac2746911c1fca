"""Calls the user's command, the key ``hook``, with events of the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from clusterddp import protocol
from clusterddp.history.beginnings import OwnCheckpointRead
from clusterddp.history.codec import encode
from clusterddp.history.ends import Requeued, Resubmitted, Stopped
from clusterddp.history.event import Event
from clusterddp.history.words import BY_SLURM, HOOK_EVENTS
from clusterddp.jobdef.job import Job
from clusterddp.process import ending_alone
from clusterddp.reporter import say
from clusterddp.rundir.files import create_file, finite
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm.run_states import Cause

_PREEMPTED = (Cause.PREEMPTED.value, Cause.PREEMPTED_WITHOUT_GRACE.value)


def hook_event(event: Event) -> str | None:
    """The word of ``HOOK_EVENTS`` for an event of the history. None if the hook is not called for it."""
    if isinstance(event, Stopped) and event.then != BY_SLURM:
        return "stopped"
    if isinstance(event, (Requeued, Resubmitted, Stopped)):
        return "preempted" if event.cause in _PREEMPTED else None
    if isinstance(event, OwnCheckpointRead):
        return "resumed"
    return event.name if event.name in HOOK_EVENTS else None


class Hook:
    """Calls the hook of a job, if it has one: the user's command, with an event of the run as JSON on standard input.

    A call never delays the ranks or changes the run: it has a separate thread and session, its output goes to
    ``logs/hook.log``, and a failure is a message. A call is killed after ``timeout_s``. Before this process exits, it
    waits for running calls as long, but only ``handover_s`` if a preempting job waits for the nodes. On a preemption
    the hook is therefore called as soon as the controller confirms it, while the ranks save.

    ``hurry``: whether a preempting job waits for this process to exit.
    """

    #: The longest that a call may take.
    timeout_s = 10.0
    #: The longest that running calls delay a preempting job.
    handover_s = 0.25

    def __init__(self, run: RunDirectory, job: Job, attempt: int, hurry: bool = False) -> None:
        self._run, self._job, self._attempt, self._hurry = run, job, attempt, hurry
        self._called: set[str] = set()
        self._calls: list[tuple[str, threading.Thread]] = []
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __bool__(self) -> bool:
        return bool(self._job.hook)

    def notify(self, event: Event) -> None:
        """Calls the hook if it gets this event of the history."""
        if (word := hook_event(event)) is not None:
            self.call(word, encode(event))

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
            thread.join(max(0.0, (self.handover_s if soon else self.timeout_s + 1) - (time.monotonic() - begun)))
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
            problem = _wait(process, word, (json.dumps(finite(values)) + "\n").encode(), self.timeout_s)
        if problem and self._processes.pop(word, None):  # else `finish` killed it
            say(f"{problem}. Its output is in {self._run.hook_log}")


def _wait(process: subprocess.Popen[bytes], word: str, values: bytes, timeout_s: float) -> str | None:
    """Waits for a call. Returns the message if it failed."""
    try:
        process.communicate(values, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _kill(process)
        process.wait()
        return f"hook timed out after {timeout_s:.0f} s ({word!r})"
    if process.returncode < 0:
        return f"hook was killed by signal {-process.returncode} ({word!r})"
    return f"hook failed with exit code {process.returncode} ({word!r})" if process.returncode else None


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
