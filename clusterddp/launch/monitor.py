"""While the ranks train: has a newer attempt started, and how long has the job left?

Two questions that nobody else asks. The time limit is timed here, from the job's EndTime as it stands now, because an
administrator may change it, and because Slurm's own warning (``--signal``) comes up to 60 s early and once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from clusterddp.errors import SlurmError
from clusterddp.job import Job
from clusterddp.launch.controller import Controller

LOOK_S = 2.0
ASK_S = 20.0


def lead_s(job: Job, last_save_s: float) -> float:
    """How many seconds before the time limit to stop: as asked for, more when saves are slow, less when time is short.

    A save may take three times as long as the last one, on a disk that everyone else uses, too.
    """
    wanted = max(job.timeouts.notice_s, 10.0 + 3.0 * last_save_s)
    return wanted if job.time_s is None else min(wanted, job.time_s / 4)


class Monitor:
    """A thread that calls ``on_time_limit`` once when it is time to stop, ``on_superseded`` once a newer attempt is."""

    def __init__(
        self,
        controller: Controller,
        lead: Callable[[], float],
        superseded: Callable[[], bool],
        on_time_limit: Callable[[], None],
        on_superseded: Callable[[], None],
    ) -> None:
        self._controller, self._lead, self._superseded = controller, lead, superseded
        self._on_time_limit, self._on_superseded = on_time_limit, on_superseded
        self._end = threading.Event()
        self._unreachable = False
        self._thread = threading.Thread(target=self._watch, name="monitor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; waits for a question that is under way no longer than a moment."""
        self._end.set()
        self._thread.join(timeout=0.1)

    def _watch(self) -> None:
        end_time = asked = None
        warned = False
        while not self._end.wait(LOOK_S if asked else 0):
            if self._superseded():
                self._on_superseded()
                return
            if asked is None or time.monotonic() - asked > ASK_S:
                end_time, asked = self._ask(end_time), time.monotonic()
            if not warned and end_time is not None and time.time() >= end_time - self._lead():
                warned = True
                self._on_time_limit()

    def _ask(self, known: float | None) -> float | None:
        """The job's EndTime; the known one when the controller does not answer, which is said once each time."""
        try:
            end_time = self._controller.end_time()
        except SlurmError as error:
            if not self._unreachable:
                print(f"clusterddp: the controller cannot be asked, training goes on: {error}", flush=True)
            self._unreachable = True
            return known
        if self._unreachable:
            print("clusterddp: the controller answers again", flush=True)
        self._unreachable = False
        return end_time
