"""How a stop comes about: signals and the supervisor's notice request it, a deadline bounds it."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from clusterddp import protocol
from clusterddp.distributed.store import AttemptStore
from clusterddp.errors import STOPPED
from clusterddp.reporter import say
from clusterddp.rundir.files import write_json
from clusterddp.training.agreement import Agreement
from clusterddp.worker import control_channel
from clusterddp.worker.deadline import Deadline
from clusterddp.worker.signals import SignalPipe, described

if TYPE_CHECKING:
    from clusterddp.training.saving import Saver
    from clusterddp.training.settings import Settings


def open_store(settings: Settings) -> AttemptStore:
    """Joins the store of this attempt, once rank 0 has told the supervisor that it is open."""
    return AttemptStore(
        *(settings.ranks, settings.store, settings.job.timeouts.start_s),
        on_open=lambda: control_channel.report("serving"),
        await_open=control_channel.await_store,
    )


class Stopping:
    """From now on, stop signals and notices are requests to stop all ranks. Made once all ranks have joined: before, a
    rank has nothing to save, and TERM ends it at once."""

    def __init__(self, settings: Settings, store: AttemptStore, report: Callable[..., None]) -> None:
        self._settings, self._rank, self._report = settings, store.rank, report
        #: Set once there is a run to save.
        self.saver: Saver | None = None
        self.deadline = Deadline(settings.notices, self._exit_with_newest)
        self.agreement = Agreement(store.store, store.watched, store.rank, store.world_size, report, self._on_request)
        self._signals = SignalPipe()
        self.agreement.listen(self._signals, self._on_handler_replaced)
        if control_channel.current is not None:
            control_channel.current.on_stop(self.agreement.on_notice)

    def close(self, *, restore_handlers: bool) -> None:
        """Signals and notices have no effect any more. ``restore_handlers``: those from before ``init()``."""
        if control_channel.current is not None:
            control_channel.current.on_stop(None)
            control_channel.current.savable = None
            control_channel.current.profile = control_channel.current.skip = None
        self._signals.close(restore_handlers=restore_handlers)
        self.agreement.close()
        self.deadline.end()

    def _on_request(self, reason: str) -> None:
        """Rank 0 waits for the end of the step no longer than the notice allows."""
        if self._rank == 0 and self.saver is not None and self.saver.saves:
            self.deadline.begin(reason, self.saver.last_save_s)

    def _on_handler_replaced(self, number: signal.Signals, handler: object) -> None:
        name, of_script = number.name.removeprefix("SIG"), described(handler)
        say(protocol.HANDLER_REPLACED.format(signal=name, handler=of_script))
        if self._rank == 0:
            self._report("handler_replaced", signal=name, handler=of_script)

    def _exit_with_newest(self, waited_s: float) -> None:
        """Ends this rank, and with it all, if the ranks did not stop in time: with what is saved or being saved."""
        assert self.saver is not None
        words = f"the step did not end within {waited_s:.0f} s of the notice"
        self._report("overdue", seconds=round(waited_s, 1))
        say(f"{words}; stacks of this rank:")
        faulthandler.dump_traceback(all_threads=True)
        try:
            committed = self.saver.finish_newest()
            say(f"exiting with checkpoint {committed}")
            if self._settings.attempt is not None and self._settings.run_dir is not None:
                record = {"rank": 0, "host": socket.gethostname(), "end": "stopped", "step": committed, "reason": words}
                path = self._settings.run_dir.rank_record(self._settings.attempt, 0)
                write_json(path, {**record, "used_clusterddp": True}, mode=0o600)
        finally:
            os._exit(STOPPED)  # any code other than 0 makes the launcher end the other ranks
