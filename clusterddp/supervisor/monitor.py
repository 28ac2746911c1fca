"""While the ranks train: a thread that looks for a newer attempt, and asks the controller what is ahead of the job.

The time limit is read from the job's EndTime as it stands now, because an administrator may change it and because
Slurm's own warning (``--signal``) comes once and up to 60 s early. A preemption is noticed here when its TERM reached
nobody: it began before the ranks' step existed, or the script changed what a signal does in its process.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from clusterddp.errors import RunDirectoryError, SlurmError, SlurmMissing, SlurmUnavailable
from clusterddp.reporter import say
from clusterddp.supervisor.controller import Controller
from clusterddp.supervisor.state import ASK_S, ControllerFailed, Event, Superseded

#: How often to look for a newer attempt, in seconds.
LOOK_S = 2.0


class Monitor:
    """Passes what it finds to ``post``, until it is closed or the attempt is superseded."""

    def __init__(self, controller: Controller, superseded: Callable[[], bool], post: Callable[[Event], None]) -> None:
        self._controller, self._superseded, self._post = controller, superseded, post
        self._requests: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True: ask now; False: end
        self._thread = threading.Thread(target=self._watch, name="monitor", daemon=True)
        self._thread.start()

    def ask(self) -> None:
        """Asks the controller now."""
        self._requests.put(True)

    def close(self) -> None:
        """Ends the thread. Does not wait for a question that is under way."""
        self._requests.put(False)
        self._thread.join(timeout=0.1)

    def _watch(self) -> None:
        ask_at = 0.0
        while True:
            try:
                if self._superseded():
                    self._post(Superseded())
                    return
            except OSError as error:
                say(f"cannot read the run directory ({error}); training continues")
            if time.monotonic() >= ask_at:
                self._post(self._asked())
                ask_at = time.monotonic() + ASK_S
            with suppress(queue.Empty):
                if not self._requests.get(timeout=LOOK_S):
                    return
                ask_at = 0.0

    def _asked(self) -> Event:
        try:
            return self._controller.notice()
        except (SlurmError, RunDirectoryError, OSError) as error:
            reachable = isinstance(error, SlurmError) and not isinstance(error, SlurmUnavailable)
            return ControllerFailed(str(error), reachable, missing=isinstance(error, SlurmMissing))
