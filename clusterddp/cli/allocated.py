"""``submit --here`` at a terminal, in an allocation of one's own (salloc): its ranks start there, in one attempt.

As under ``--local`` the supervisor has a session of its own, so that Ctrl-C reaches neither it nor srun.
"""

from __future__ import annotations

import signal
from typing import ClassVar

from clusterddp.cli.local import LocalRun
from clusterddp.reporter import show
from clusterddp.slurm.cause import Cause


class AllocatedRun(LocalRun):
    """The loop of ``submit --local``, which ends with the first attempt: nobody asks for another."""

    #: To the supervisor it does nothing, and srun hands it on to every rank.
    stop_signal: ClassVar[signal.Signals] = signal.SIGUSR2

    def _options(self) -> list[str]:
        return []

    def _interrupted(self) -> None:
        self.interrupts += 1
        show("\nsaving and stopping; scancel ends the allocation at once")
        self._signal(Cause.INTERRUPTED)
