"""While the ranks train: looks for a newer attempt, a preemption and the time limit.

The time limit is timed here, from the job's EndTime as it stands now, because an administrator may change it, and
because Slurm's own warning (``--signal``) comes up to 60 s early and once. A preemption is noticed here when its TERM
reached nobody: it began before the ranks' step existed, or the script has changed what a signal does in its process.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

from clusterddp.errors import RunDirectoryError, SlurmError, SlurmMissing
from clusterddp.jobdef.job import Job
from clusterddp.reporter import say
from clusterddp.supervisor.controller import Controller, Notice, Stop

LOOK_S = 2.0
#: How often the controller is asked. A stop that no signal brought is known to the ranks within 5 s.
ASK_S = 4.0
#: A signal gets this much time to reach the ranks before they are told what it means.
SETTLE_S = 0.5


def stop_margin_s(job: Job, last_save_s: float) -> float:
    """How many seconds before the time limit to stop: as asked for, more when saves are slow, less when time is short.

    A save may take three times as long as the last one, on a disk that everyone else uses, too.
    """
    wanted = max(job.timeouts.notice_s, 10.0 + 3.0 * last_save_s)
    return wanted if job.time_s is None else min(wanted, job.time_s / 4)


_WORDS = {
    Stop.PREEMPTION: "the job is being preempted",
    Stop.JOB_END: "the job is being ended",
    Stop.INTERRUPTION: "the run is being interrupted",
}


class Watched(Protocol):
    """The attempt that is monitored."""

    def superseded(self) -> bool:
        """Whether a newer attempt exists."""

    def stop_margin_s(self) -> float:
        """How many seconds before the time limit to stop."""

    def heard(self) -> bool:
        """Whether a rank has said that it was told to stop."""

    def on_notice(self, stop: Stop, why: str) -> None:
        """It is time to stop. Called again, every look, until a rank has heard it."""

    def on_superseded(self) -> None:
        """A newer attempt trains the run. Called once."""

    def on_controller(self, away: str | None) -> None:
        """The controller is unreachable, and why; None: it answers again. Called once each time."""

    def on_controller_missing(self, why: str) -> None:
        """The controller can never be asked from here. Called once."""


class Monitor:
    """A thread that watches over one attempt until it is closed."""

    def __init__(self, controller: Controller, watched: Watched) -> None:
        self._controller, self._watched = controller, watched
        self._end = threading.Event()
        self._silent = self._missing = self._due_before = False
        self._thread = threading.Thread(target=self._watch, name="monitor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; waits for a question that is under way no longer than a moment."""
        self._end.set()
        self._thread.join(timeout=0.1)

    def _watch(self) -> None:
        ahead, ask_at = Notice(None), 0.0
        while True:
            try:
                if self._watched.superseded():
                    self._watched.on_superseded()
                    return
            except OSError as error:
                say(f"the run directory cannot be looked at ({error}); training goes on")
            if time.monotonic() >= ask_at:
                ahead = self._ask(ahead)
                ask_at = time.monotonic() + ASK_S
            if self._end.wait(self._look_ahead(ahead)):
                return

    def _look_ahead(self, ahead: Notice) -> float:
        """Says what is due, and returns the seconds until the next look."""
        due = self._due(ahead)
        first, self._due_before = not self._due_before, due is not None
        if due is None or self._watched.heard():
            return LOOK_S
        if first and ahead.stop is not None:  # a signal is on its way
            return SETTLE_S
        self._watched.on_notice(*due)
        return LOOK_S

    def _due(self, ahead: Notice) -> tuple[Stop, str] | None:
        """Why to stop, and the same in words."""
        if ahead.stop is not None:
            return ahead.stop, _WORDS[ahead.stop]
        if ahead.end_time is not None and time.time() >= ahead.end_time - self._watched.stop_margin_s():
            return Stop.TIME_LIMIT, f"the time limit is {max(0, round(ahead.end_time - time.time()))} s away"
        return None

    def _ask(self, known: Notice) -> Notice:
        """What is ahead; as far as known when the controller does not answer, which is told once each time."""
        try:
            ahead = self._controller.notice()
        except SlurmMissing as error:
            if not self._missing:
                self._watched.on_controller_missing(str(error))
            self._missing = True
            return known
        except (SlurmError, RunDirectoryError, OSError) as error:
            if not self._silent:
                self._watched.on_controller(str(error))
            self._silent = True
            return known
        if self._silent:
            self._watched.on_controller(None)
        self._silent = False
        return ahead
