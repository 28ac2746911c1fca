"""All ranks stop at the same boundary, without any communication per step.

A *boundary* is a call of ``Agreement.boundary``. All ranks make the same sequence of these calls, numbered 0, 1, 2 ...:
the step loop makes one before its first step and one after each; evaluations and other loops make their own.

Each rank has a watcher thread with its own store connection, blocked on one key. The first rank that is asked to stop
sets the key. Every watcher then *first raises a local flag, then reads and publishes the number of the last boundary
that its main thread entered* (-1: none yet). The main thread, at a boundary, *first writes its number, then reads the
flag*. So if a main thread saw no flag at boundary n, its watcher publishes n or more; if it saw the flag, it does not
pass its published number until it knows the maximum over all ranks. All ranks stop at the boundary after that maximum:
none can have passed it, and every rank will reach it. At most one extra step is made.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from contextlib import suppress

from torch._C._distributed_c10d import Store

from clusterddp.errors import ClusterddpError
from clusterddp.worker.signals import SignalPipe

_STOP, _LAST, _COUNT = "agreement/stop", "agreement/last", "agreement/published"


class StopVote:
    """One rank's part of the protocol. Each method is one atomic action, and the order of the calls matters."""

    def __init__(self) -> None:
        self.entered = -1
        #: Whether the ranks are agreeing on a stop. The watcher sets it first; the main thread reads it second.
        self.flagged = False
        self.published: int | None = None
        self.last: int | None = None

    def enter(self) -> int:
        """Main thread, first: the number of the boundary it has reached."""
        self.entered += 1
        return self.entered

    def publish(self) -> int:
        """Watcher, second: the number to publish."""
        self.published = self.entered
        return self.published

    def may_pass(self, number: int) -> bool:
        """Whether ``number`` is at most what this rank published, so that no maximum can require a stop there."""
        return self.published is not None and number <= self.published

    def stops_at(self, number: int) -> bool:
        """Whether all ranks stop at boundary ``number`` or before it. The maximum must be known."""
        assert self.last is not None
        return number > self.last


class Agreement:
    """One per process, made by all ranks.

    Args:
        store: the main thread's connection. While that thread waits on it, a request is delayed; it is not at a
            boundary anyway.
        watched: a connection for the watcher, whose ``get`` has no timeout.
        report: adds events to the history.
        on_request: gets the reason for a stop, on every rank, in the watcher's thread, before the ranks agree.
    """

    def __init__(
        self,
        store: Store,
        watched: Store,
        rank: int,
        world_size: int,
        report: Callable[..., None],
        on_request: Callable[[str], None],
    ) -> None:
        self.reason: str | None = None
        self._on_request = on_request
        self._store, self._report = store, report
        self._rank, self._world_size = rank, world_size
        self._stop_vote = StopVote()
        self._published, self._known = threading.Event(), threading.Event()
        self._lost: Exception | None = None
        self._asking = threading.Lock()
        self._asked = False
        self._signals: SignalPipe | None = None
        self._watcher = threading.Thread(target=self._watch, args=(watched,), name="agreement", daemon=True)
        self._watcher.start()

    def listen(self, signals: SignalPipe, on_replaced: Callable[[signal.Signals, object], None]) -> None:
        """From now on, a stop signal to this process is a request to stop all ranks.

        ``on_replaced``: see ``SignalPipe.listen``; the handlers are checked at each boundary.
        """
        signals.listen(self._on_signal, on_replaced)
        self._signals = signals

    def on_notice(self, reason: str) -> None:
        """Handles the supervisor's notice to stop. Any thread; does not wait for the store."""
        self._report("notified", reason=reason)
        threading.Thread(target=self._ask, args=(reason,), name="notice", daemon=True).start()

    def boundary(self) -> bool:
        """Whether to stop here, with the same answer on all ranks at the same call. For the main thread.

        Takes 0.2 us in a tight loop, 4 to 8 us after a step that has displaced the CPU's caches; sends nothing while no
        stop is requested. Raises ClusterddpError if the store is lost during a stop.
        """
        if self._signals is not None:
            self._signals.check()
        number = self._stop_vote.enter()
        if not self._stop_vote.flagged:
            return False
        self._published.wait()
        if self._stop_vote.may_pass(number):
            return False
        self._known.wait()
        if self._stop_vote.last is None:
            raise ClusterddpError(
                f"rank {self._rank} was asked to stop ({self.reason}), but rank 0's store is unreachable "
                f"({self._lost}): rank 0 has failed or exited early"
            )
        return self._stop_vote.stops_at(number)

    @property
    def entered(self) -> int:
        """The number of boundaries that this rank has reached."""
        return self._stop_vote.entered + 1

    def request(self, reason: str) -> None:
        """Asks all ranks to stop at their next common boundary. From any rank and thread, any number of times."""
        with self._asking:
            if self._asked or self._lost:
                return
            self._asked = True
            self._store.compare_set(_STOP, "", json.dumps({"reason": reason}))

    def close(self) -> None:
        """Ends the watchers of all ranks, as a rank that makes no more boundaries cannot agree on a stop.

        Bounded: if the store is lost, the watcher has ended by itself, or is abandoned after 5 s. The threads are
        joined, because one that returned from torch's C++ code during interpreter shutdown would abort the process.
        """
        closer = threading.Thread(target=self._publish_end, name="agreement-end", daemon=True)
        closer.start()
        for thread in (closer, self._watcher):
            thread.join(timeout=5)

    def _publish_end(self) -> None:
        with suppress(RuntimeError):  # the store is lost, and every watcher has noticed
            self._store.compare_set(_STOP, "", json.dumps({"reason": None}))

    def _on_signal(self, number: signal.Signals) -> None:
        name = number.name.removeprefix("SIG")
        self._report("signal", signal=name)
        self._ask(f"signal {name}")

    def _ask(self, reason: str) -> None:
        try:
            self.request(reason)
        except RuntimeError as error:
            self._lost = error  # Rank 0 has failed: the others fail in their next collective, which is what to show.

    def _watch(self, store: Store) -> None:
        try:
            self.reason = json.loads(store.get(_STOP))["reason"]
            if self.reason is not None:
                self._on_request(self.reason)
                self._vote(store)
        except RuntimeError as error:
            self._lost = error
        finally:
            self._known.set()

    def _vote(self, store: Store) -> None:
        self._stop_vote.flagged = True
        number = self._stop_vote.publish()
        self._published.set()
        store.set(_published_by(self._rank), str(number))
        if store.add(_COUNT, 1) == self._world_size:
            numbers = store.multi_get([_published_by(rank) for rank in range(self._world_size)])
            store.set(_LAST, str(max(map(int, numbers))))
        self._stop_vote.last = int(store.get(_LAST))


def _published_by(rank: int) -> str:
    return f"{_COUNT}/{rank}"
