"""The state of a rank's process, in one object.

The rank's entry point (``main`` of ``worker/rank.py``) makes it and passes it on. Only functions that the script calls,
such as ``clusterddp.init()``, and hooks in its optimizers and forks get it from ``current()``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Protocol

from clusterddp.errors import Stopped
from clusterddp.messages.reports import Report
from clusterddp.worker.control_channel import ControlChannel, RunRequests
from clusterddp.worker.deferred_stops import DeferredStops
from clusterddp.worker.gpus import GpuWatch
from clusterddp.worker.optimizer_hook import OptimizerHook
from clusterddp.worker.rank_exit import Exit, Training
from clusterddp.worker.resume_watch import ResumeWatch
from clusterddp.worker.script_saves import ScriptSaves
from clusterddp.worker.signals import StopSignals


class InitializedContext(Protocol):
    """A ``Context`` of ``training/context.py``."""

    def in_forked_child(self) -> None:
        """Leaves the process group and the run directory to the parent."""


class RankProcess:
    """The state of this process. Without a supervisor, as under torchrun, the methods that report to it or wait for it
    have no effect. Nor have they in a forked child, which inherits the object but is no rank.
    """

    def __init__(self, channel: ControlChannel | None = None) -> None:
        #: The connection to the supervisor, once this rank has joined it.
        self.channel = channel
        #: Watches this rank's GPUs, if its job uses GPUs.
        self.gpus: GpuWatch | None = None
        #: On rank 0, if there is a file from which the script is to continue.
        self.resume_watch: ResumeWatch | None = None
        self.signals = StopSignals()
        self.deferred_stops = DeferredStops()
        self.saves = ScriptSaves(self.deferred_stops, self.report)
        self.optimizers = OptimizerHook()
        self.training = Training()
        self.exit = Exit()
        # Set and used by training/, above this package. Hence the types:
        #: From ``clusterddp.init()`` until it is closed.
        self.context: InitializedContext | None = None
        #: The ``ScriptLoop`` of ``clusterddp.stop_requested()`` and the ``EpochItems`` of ``continue_epoch()``. Made by
        #: the first call.
        self.loop: object = None
        self.epoch: object = None
        #: The ``ScriptSteps`` of a script without a context. Made at its first step.
        self.steps: object = None
        #: The newest one that was raised. The rank stays stopped even if the script catches it and continues.
        self.stopped: Stopped | None = None
        #: Why this process has sent itself a TERM for a stop. Empty if it has not.
        self.terminated = ""

    # --- the supervisor

    @property
    def supervised(self) -> bool:
        """Whether this process reports to a supervisor that has started it."""
        return self.channel is not None

    def report(self, what: Report) -> None:
        """Reports this to the supervisor, if there is one."""
        if self.channel is not None:
            self.channel.send(what)

    @property
    def variables(self) -> Mapping[str, str]:
        """torchrun's variables as this rank got them, because a script that asks MPI for its rank overwrites them.
        Empty without a supervisor."""
        return {} if self.channel is None else self.channel.variables

    def on_stop(self, act: Callable[[str], None] | None) -> None:
        """Calls ``act`` once with each reason for which the supervisor orders a stop. At once if it already has."""
        if self.channel is not None:
            self.channel.on_stop(act)

    def on_requests(self, run: RunRequests | None) -> None:
        """From now on ``run`` serves the user's requests. None: there is no longer a run."""
        if self.channel is not None:
            self.channel.run = run
            if run is not None:
                self.channel.steps_made = lambda: run.progress()[0]

    def on_hang(self, write_flight_record: Callable[[], None]) -> None:
        """Calls this, which takes a bounded time, before the supervisor ends a hang."""
        if self.channel is not None:
            self.channel.write_flight_record = write_flight_record

    def why_not_commit(self, step: int, is_certain: Callable[[], bool]) -> str | None:
        """Asks the supervisor whether every rank has made ``step``: the reason if one is lost, or None."""
        return None if self.channel is None else self.channel.why_not_commit(step, is_certain)

    def await_store(self, seconds: float) -> bool:
        """Waits until rank 0's store is open or the supervisor is unreachable. Returns False on timeout."""
        return self.channel is None or self.channel.store_open.wait(seconds)

    # --- the script

    def note_stops(self, on_stopped: Callable[[Stopped], None]) -> None:
        """From now on, keeps each ``Stopped`` that is raised, and calls ``on_stopped`` with it."""

        def note(stopped: Stopped) -> None:
            self.stopped = stopped
            on_stopped(stopped)

        Stopped.on_raised = note

    def in_forked_child(self) -> None:
        """Drops what belongs to the rank. The child's saves stay protected, and its first step is noted."""
        if self.channel is not None:
            self.channel.close()
        self.channel = self.gpus = self.resume_watch = None
        self.stopped = Stopped.on_raised = None
        self.training.complete_loop()
        if self.context is not None:
            self.context.in_forked_child()
        self.loop = self.steps = None
        self.deferred_stops.forget()
        self.saves.around = nullcontext
        self.optimizers.in_forked_child()


_current: RankProcess | None = None


def begin() -> RankProcess:
    """Makes the state of this process. Its entry point calls this once."""
    global _current
    _current = RankProcess()
    return _current


def current() -> RankProcess:
    """The state of this process, which is made here if the process did not start with an entry point of ours, as under
    torchrun."""
    return _current or begin()


os.register_at_fork(after_in_child=lambda: current().in_forked_child())
os.register_at_fork(  # last, because signals arrive from then on
    before=lambda: current().signals.before_fork(),
    after_in_parent=lambda: current().signals.after_fork(),
    after_in_child=lambda: current().signals.in_forked_child(),
)
