"""A thread that looks for a newer attempt while the ranks train, and asks the controller when the job must stop.

The time limit is read from the job's EndTime as it stands now, because an administrator may change it and because
Slurm's own warning (``--signal``) comes once and up to 60 s early. A preemption is noticed here when its TERM reached
no rank: it began before the ranks' step existed, or the script changed what a signal does in its process.

A controller serves thousands of jobs. It is asked about once a minute in quiet times, and often at the start, after a
signal or a lost connection, and when it is nearly time to stop.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from clusterddp.errors import RunDirectoryError, SlurmError, SlurmMissing, SlurmUnavailable
from clusterddp.reporter import say
from clusterddp.rundir.files import status
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.supervisor.controller import Controller
from clusterddp.supervisor.state import ASK_S, ControllerFailed, Event, RunRemoved, Superseded

#: How often to look for a newer attempt, in seconds.
LOOK_S = 2.0
#: How long the run directory must be missing, in seconds: a file server may have an outage.
REMOVED_S = 30.0
#: Seconds after the start, or after ``ask``, during which the controller is asked every ASK_S.
RESTLESS_S = 30.0
#: The least and the most seconds between two questions in quiet times, so that those of many jobs spread out.
QUIET_S = (60.0, 75.0)


class Monitor:
    """Passes what it finds to ``post``, until it is closed or the attempt is superseded.

    ``margin_s``: how many seconds before the time limit the ranks must stop, at the moment. ``failed`` gets an
    error that ends the thread.
    """

    def __init__(
        self,
        controller: Controller,
        run: RunDirectory,
        attempt: int,
        post: Callable[[Event], None],
        margin_s: Callable[[], float],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._controller, self._run, self._attempt, self._post = controller, run, attempt, post
        self._margin_s, self._failed = margin_s, failed
        self._requests: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True: ask now; False: end
        self._end_time: float | None = None
        self._failures = 0
        self._missing_since: float | None = None
        self._thread = threading.Thread(target=self._work, name="monitor", daemon=True)
        self._thread.start()

    def ask(self) -> None:
        """Asks the controller now."""
        self._requests.put(True)

    def close(self) -> None:
        """Ends the thread, without waiting for a question that is under way."""
        self._requests.put(False)
        self._thread.join(timeout=0.1)

    def _work(self) -> None:
        try:
            self._watch()
        except BaseException as error:
            self._failed(error)

    def _watch(self) -> None:
        ask_at, restless_until = 0.0, time.monotonic() + RESTLESS_S
        while (found := self._look()) is None:
            if time.monotonic() >= ask_at:
                self._post(self._asked())
                ask_at = time.monotonic() + self._pause_s(restless=time.monotonic() < restless_until)
            with suppress(queue.Empty):
                if not self._requests.get(timeout=LOOK_S):
                    return
                ask_at, restless_until = 0.0, time.monotonic() + RESTLESS_S
        self._post(found)

    def _look(self) -> Superseded | RunRemoved | None:
        """Whether the run directory shows that the attempt must end, and why."""
        try:
            if self._run.superseded(self._attempt):
                return Superseded()
            own = (self._run.job_file, self._run.attempt_private(self._attempt))
            if not all(map(_missing, own)):
                self._missing_since = None
                return None
        except OSError as error:
            say(f"could not read the run directory ({error}). Training continues")
            return None
        now = time.monotonic()
        if self._missing_since is None:
            self._missing_since = now
        return RunRemoved(f"{self._run} was removed or renamed") if now - self._missing_since >= REMOVED_S else None

    def _asked(self) -> Event:
        try:
            notice = self._controller.notice()
        except (SlurmError, RunDirectoryError, OSError) as error:
            self._failures += 1
            reachable = isinstance(error, SlurmError) and not isinstance(error, SlurmUnavailable)
            return ControllerFailed(str(error), reachable, missing=isinstance(error, SlurmMissing))
        self._failures, self._end_time = 0, notice.end_time
        return notice

    def _pause_s(self, restless: bool) -> float:
        if restless or not self._controller.busy:
            return ASK_S
        return pause_s(
            None if self._end_time is None else self._end_time - self._margin_s() - time.time(), self._failures
        )


def pause_s(left_s: float | None, failures: int = 0) -> float:
    """How long until the next question to a controller that serves many jobs, in seconds.

    ``left_s``: until the ranks must stop before the time limit, None if there is none. An administrator may
    extend the limit up to then. ``failures``: how many questions in a row it has not answered.
    """
    if failures:
        return min(QUIET_S[0], ASK_S * 2.0 ** min(failures, 10))
    quiet = random.uniform(*QUIET_S)
    return quiet if left_s is None else min(quiet, max(ASK_S, left_s - 2 * ASK_S))


def _missing(path: Path) -> bool:
    """Whether a path does not exist. Raises OSError if that is unknown."""
    try:
        status(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    return False
