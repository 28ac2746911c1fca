"""``submit --here`` at a terminal, in an allocation of one's own (salloc): its ranks start there, in one attempt.

As under ``--local`` the supervisor has a session of its own, so that Ctrl-C reaches neither it nor srun.
"""

from __future__ import annotations

import os
import signal
import sys

from clusterddp.launch.cause import Cause
from clusterddp.launch.controller import give_notice
from clusterddp.launch.local import LocalRun


class AllocatedRun(LocalRun):
    """The loop of ``submit --local``, which ends with the first attempt: nobody asks for another."""

    def _options(self) -> list[str]:
        return []

    def _interrupted(self) -> None:
        self.interrupts += 1
        print("\nsaving and stopping; scancel ends the allocation at once", file=sys.stderr, flush=True)
        self._signal(Cause.INTERRUPTED)

    def _signal(self, cause: Cause) -> None:
        """USR2 to the supervisor, to which it does nothing, and to srun, which hands it on to every rank."""
        give_notice(self.run, cause)
        try:
            os.killpg(self._process.pid, signal.SIGUSR2)
        except ProcessLookupError:
            pass
