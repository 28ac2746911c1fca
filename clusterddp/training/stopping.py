"""How a signal to one rank, or a notice of the supervisor, makes all ranks stop after the same step.

``Stopping`` is made once all ranks have joined. Before that, TERM ends a rank. A thread of
``worker/signals.SignalPipe`` receives the signal, even while the main thread is in a collective, and puts a request
into rank 0's store (``Agreement._on_signal``). On each rank, a watcher thread is blocked on the key of that request. It
raises a local flag and publishes the number of the last step boundary that its main thread has entered. All ranks stop
at the boundary after the maximum of these numbers, so at most one extra step is made. There ``loop.Run.stop`` saves and
raises ``Stopped``. If rank 0's step takes too long, ``Deadline`` ends the process with the newest checkpoint.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import Store

from clusterddp.distributed.process_group import AttemptStore
from clusterddp.errors import STOPPED, ClusterddpError
from clusterddp.history.event import Reported
from clusterddp.history.stops import HANDLER_REPLACED, HandlerReplaced, Notified, Overdue, Signal
from clusterddp.messages.reports import End, Left, Serving, record_of
from clusterddp.reporter import say
from clusterddp.rundir.files import write_json
from clusterddp.worker.rank_process import RankProcess
from clusterddp.worker.signals import SignalPipe, described

if TYPE_CHECKING:
    from clusterddp.training.saving import Saver
    from clusterddp.training.settings import Settings

#: Seconds reserved for all ranks to exit.
MARGIN_S = 3.0
#: The request's key in the store.
_KEY = "agreement"


class Deadline:
    """Calls ``act`` once, in a timer thread, if a requested stop has not begun in time.

    If a step hangs, or outlasts the grace period, the newest checkpoint must still be saved.

    ``notices``: seconds from each reason for a stop to the KILL. A reason that is not listed has no deadline. The
    nearest of several deadlines counts.
    """

    def __init__(self, notices: Mapping[str, float], act: Callable[[float], None]) -> None:
        self._notices, self._act = notices, act
        self._timers: list[threading.Timer] = []
        #: When the first of them acts (CLOCK_MONOTONIC, s).
        self._ends = math.inf
        self._lock = threading.Lock()
        self._over = False

    @property
    def left_s(self) -> float:
        """The seconds until ``act`` is called."""
        return self._ends - time.monotonic()

    def begin(self, reason: str, save_s: float) -> None:
        """A stop has been requested, perhaps not the first. ``act`` is called with the seconds since then.

        ``save_s``: the longest that a save may take.
        """
        if (notice_s := self._notices.get(reason)) is None:
            return
        # If a save may take most of the grace period, the step still gets half of it, which only a hanging one needs.
        wait_s = max(notice_s / 2, notice_s - MARGIN_S - save_s)
        timer = threading.Timer(wait_s, self._act_unless_over, args=(time.monotonic(),))
        timer.daemon = True
        with self._lock:
            if not self._over:
                self._timers.append(timer)
                self._ends = min(self._ends, time.monotonic() + wait_s)
                timer.start()

    def end(self) -> None:
        """The stop has begun, or is no longer requested."""
        with self._lock:
            self._over = True
        for timer in self._timers:
            timer.cancel()

    def _act_unless_over(self, begun: float) -> None:
        with self._lock:
            if not self._over:
                self._over = True
                self._act(time.monotonic() - begun)


class Vote:
    """One rank's part of the protocol. Each method is one atomic action. Their order matters."""

    def __init__(self) -> None:
        self.published: int | None = None
        #: The maximum over all ranks, once it is known.
        self.last: int | None = None
        #: Set once this rank has published, and once the maximum is known or can no longer be.
        self.voted, self.known = threading.Event(), threading.Event()

    def publish(self, entered: int) -> int:
        """Watcher, second: the number to publish is that of the last boundary that the main thread entered."""
        self.published = entered
        return entered

    def may_pass(self, number: int) -> bool:
        """Whether ``number`` is at most what this rank published, so that no maximum can require a stop there."""
        return self.published is not None and number <= self.published

    def stops_at(self, number: int) -> bool:
        """Whether all ranks stop at boundary ``number`` or before it. The maximum must be known."""
        assert self.last is not None
        return number > self.last


class Agreement:
    """One per process, made by all ranks. After a request, all stop at the same boundary.

    A *boundary* is a call of ``boundary``. All ranks make the same sequence of these calls, numbered 0, 1, 2 ...:
    ``ctx.run()`` makes one before it restores a checkpoint, the step loop one before its first step and one after each.
    Evaluations and other loops make their own. Without a request, a boundary does not communicate.

    A request is a key in the store, which any rank sets. Each rank has a watcher thread with its own store connection,
    blocked on that key. Every watcher then *first raises a local flag, then reads and publishes the number of the last
    boundary that its main thread entered* (-1: none yet). The main thread, at a boundary, *first writes its number,
    then reads the flag*. So if a main thread saw no flag at boundary n, its watcher publishes n or more. If it saw the
    flag, it does not pass its published number until it knows the maximum over all ranks. All ranks stop at the
    boundary after that maximum: none can have passed it, and every rank will reach it.

    Args:
        store: the main thread's connection. While that thread waits on it, outside a boundary, a request is delayed.
        watched: a connection for the watcher, whose ``get`` has no timeout.
        report: adds events to the history.
        on_request: called with the reason for a stop, on every rank, in the watcher's thread, before the ranks agree.
            Also called in other threads for each signal to this rank and each notice, even if the ranks already stop.
    """

    def __init__(
        self,
        store: Store,
        watched: Store,
        rank: int,
        world_size: int,
        report: Callable[[Reported], None],
        on_request: Callable[[str], None],
    ) -> None:
        self.reason: str | None = None
        self._on_request = on_request
        self._store, self._report = store, report
        self._rank, self._world_size = rank, world_size
        self._entered = -1
        #: Set by the watcher once there is a request: the flag.
        self._vote: Vote | None = None
        self._lost: Exception | None = None
        self._asking = threading.Lock()
        self._asked = False
        self._signals: SignalPipe | None = None
        self._watcher = threading.Thread(target=self._watch, args=(watched,), name="agreement", daemon=True)
        self._watcher.start()

    def listen(self, signals: SignalPipe, on_replaced: Callable[[signal.Signals, object], None]) -> None:
        """From now on, a stop signal to this process is a request to stop all ranks.

        ``on_replaced``: see ``SignalPipe.listen``. The handlers are checked at each boundary.
        """
        signals.listen(self._on_signal, on_replaced)
        self._signals = signals

    def on_notice(self, reason: str) -> None:
        """Handles the supervisor's notice to stop. Any thread. Does not wait for the store."""
        self._report(Notified(reason=reason))
        threading.Thread(target=self._ask, args=(reason,), name="notice", daemon=True).start()

    def boundary(self) -> bool:
        """Whether to stop here, with the same answer on all ranks at the same call. For the main thread.

        Takes 0.2 us in a tight loop, 4 to 8 us after a step that has displaced the CPU's caches. Communicates only once
        a stop is requested. Raises ClusterddpError if the store is lost during a stop.
        """
        if self._signals is not None:
            self._signals.check()
        self._entered += 1
        return self._vote is not None and self._stops_at(self._entered, self._vote)

    def _stops_at(self, number: int, vote: Vote) -> bool:
        vote.voted.wait()
        if vote.may_pass(number):
            return False
        vote.known.wait()
        if vote.last is None:
            raise ClusterddpError(
                f"rank {self._rank} was asked to stop ({self.reason}), but rank 0's store is unreachable "
                f"({self._lost}). Rank 0 failed or exited early"
            )
        return vote.stops_at(number)

    @property
    def entered(self) -> int:
        """The number of boundaries that this rank has reached."""
        return self._entered + 1

    def request(self, reason: str) -> None:
        """Asks all ranks to stop at their next common boundary. From any rank and thread, any number of times."""
        with self._asking:
            if self._asked or self._lost:
                return
            self._asked = True
            self._put({"reason": reason})

    def close(self) -> None:
        """Ends the watchers of all ranks, as a rank that makes no more boundaries cannot agree on a stop.

        Takes bounded time: if the store is lost, the watcher has ended by itself, or is abandoned after 5 s. The
        threads are joined, because one that returned from torch's C++ code during interpreter shutdown would abort the
        process.
        """
        closer = threading.Thread(target=self._put_end, name="agreement-end", daemon=True)
        closer.start()
        for thread in (closer, self._watcher):
            thread.join(timeout=5)

    def _put(self, request: Mapping[str, Any]) -> None:
        """Makes this the request of all ranks, unless there is one."""
        self._store.compare_set(_KEY, "", json.dumps(request))

    def _put_end(self) -> None:
        with suppress(RuntimeError):  # the store is lost, and every watcher has noticed
            self._put({"end": True})

    def _on_signal(self, number: signal.Signals) -> None:
        name = number.name.removeprefix("SIG")
        self._report(Signal(signal=name))
        self._ask(f"signal {name}")

    def _ask(self, reason: str) -> None:
        self._on_request(reason)  # this one may leave less time than the request that the ranks have
        try:
            self.request(reason)
        except RuntimeError as error:
            self._lost = error  # Rank 0 has failed. The others fail in their next collective, and that error is shown.

    def _watch(self, store: Store) -> None:
        try:
            request = json.loads(store.get(_KEY))
            if "end" not in request:
                self.reason = request["reason"]
                self._on_request(request["reason"])
                self._agree(store)
        except RuntimeError as error:
            self._lost = error
        finally:
            if self._vote is not None:
                self._vote.known.set()

    def _agree(self, store: Store) -> None:
        self._vote = vote = Vote()
        number = vote.publish(self._entered)
        vote.voted.set()
        store.set(f"{_KEY}/published/{self._rank}", str(number))
        if store.add(f"{_KEY}/published", 1) == self._world_size:
            numbers = store.multi_get([f"{_KEY}/published/{rank}" for rank in range(self._world_size)])
            store.set(f"{_KEY}/last", str(max(map(int, numbers))))
        vote.last = int(store.get(f"{_KEY}/last"))


def open_store(process: RankProcess, settings: Settings) -> AttemptStore:
    """Joins the store of this attempt, once rank 0 has opened it."""
    return AttemptStore(
        *(settings.ranks, settings.store, settings.job.timeouts.start_s),
        on_open=lambda: process.report(Serving()),
        await_open=process.await_store,
    )


class Stopping:
    """From now on, stop signals and notices are requests to stop all ranks. Made once all ranks have joined. Before, a
    rank has no state to save, and TERM ends it at once."""

    def __init__(
        self, process: RankProcess, settings: Settings, store: AttemptStore, report: Callable[[Reported], None]
    ) -> None:
        self._process = process
        self._settings, self._rank, self._report = settings, store.rank, report
        #: Set once there is a run to save.
        self.saver: Saver | None = None
        self.deadline = Deadline(settings.notices, self._exit_with_newest)
        self.agreement = Agreement(store.store, store.watched, store.rank, store.world_size, report, self._on_request)
        self.agreement.listen(self._process.signals.catch(), self._on_handler_replaced)
        self._process.on_stop(self.agreement.on_notice)

    def close(self, *, restore_handlers: bool) -> None:
        """Signals and notices no longer have an effect. ``restore_handlers``: those from before ``init()``."""
        self._process.on_stop(None)
        self._process.on_requests(None)
        self._process.signals.close(restore_handlers=restore_handlers)
        self.agreement.close()
        self.deadline.end()

    def _on_request(self, reason: str) -> None:
        """Rank 0 waits for the end of the step no longer than the grace period allows."""
        if self._rank == 0 and self.saver is not None and self.saver.saves:
            self.deadline.begin(reason, self.saver.longest_save_s)

    def _on_handler_replaced(self, number: signal.Signals, handler: object) -> None:
        name, of_script = number.name.removeprefix("SIG"), described(handler)
        say(HANDLER_REPLACED.format(signal=name, handler=of_script))
        if self._rank == 0:
            self._report(HandlerReplaced(signal=name, handler=of_script))

    def _exit_with_newest(self, waited_s: float) -> None:
        """Ends this rank, and thereby all, if the ranks did not stop in time, with what is saved or being saved."""
        assert self.saver is not None
        words = f"the step did not end within {waited_s:.0f} s of the stop request"
        self._report(Overdue(seconds=round(waited_s, 1)))
        say(f"{words}. Stacks of this rank:")
        faulthandler.dump_traceback(all_threads=True)
        try:
            committed = self.saver.finish_newest()
            say("exiting without a checkpoint" if committed is None else f"exiting with checkpoint {committed}")
            if self._settings.attempt is not None and self._settings.run_dir is not None:
                left = Left(socket.gethostname(), End.STOPPED, step=committed, reason=words, used_clusterddp=True)
                path = self._settings.run_dir.rank_record(self._settings.attempt, 0)
                write_json(path, record_of(left, 0), mode=0o600)
        finally:
            os._exit(STOPPED)  # for any code other than 0, the supervisor or the launcher ends the other ranks
