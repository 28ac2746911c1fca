"""This attempt's number, and its events in the run's history."""

from __future__ import annotations

import time
from typing import Any

from clusterddp.distributed.store import AttemptStore
from clusterddp.reporter import say
from clusterddp.rundir.files import append_line
from clusterddp.training.settings import Settings
from clusterddp.worker import control_channel


class AttemptHistory:
    """Collective. ``number`` comes from the supervisor, or is claimed by rank 0 if there is none."""

    def __init__(self, settings: Settings, store: AttemptStore) -> None:
        self._directory, self._rank = settings.run_dir, store.rank
        #: In a forked child: the run belongs to the parent.
        self.closed = False
        self.number = settings.attempt or 0
        if settings.attempt is None and self._directory is not None:
            if store.rank == 0:
                self._directory.create()
                store.store.set("attempt", str(self._directory.create_attempt()))
            self.number = int(store.store.get("attempt"))

    def report(self, event: str, **values: Any) -> None:
        """Adds an event: through the supervisor, or by rank 0 if there is none."""
        if self.closed:
            return
        control_channel.report(event, **values)
        if control_channel.current is None and self._rank == 0 and self._directory is not None:
            line = {"time": time.time(), "attempt": self.number, "event": event, **values}
            try:
                append_line(self._directory.events_file, line)
            except OSError as error:
                say(f"cannot add {event!r} to the history: {error.strerror}")
