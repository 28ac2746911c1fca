"""DataLoader workers: they never see the stop signals, and never outlive or delay their rank."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from clusterddp.process import at_exit, unlink_shared_tensors
from clusterddp.worker import signals

#: Seconds that workers get to finish their current sample before they are killed.
_GRACE_S = 1.0
#: Iterators that may have workers: those of clusterddp's loaders, and those of the script's own.
_iterators: weakref.WeakSet[Any] = weakref.WeakSet()
_others: weakref.WeakSet[Any] = weakref.WeakSet()
_iter_of_torch = DataLoader.__iter__


class ShieldedDataLoader(DataLoader[Any]):
    """A DataLoader whose workers never see the stop signals and are ended by ``close_workers``."""

    def __iter__(self) -> Any:
        return _start(self, _iterators)


def shield_workers() -> None:
    """From now on no DataLoader's workers see the stop signals, including those of the script's own loaders.

    A TERM would kill torch's workers and, with them, their rank before it can save. Python would wait for the shielded
    ones when the process exits, so they are closed before.
    """
    if DataLoader.__iter__ is _iter_of_torch:
        DataLoader.__iter__ = lambda loader: _start(loader, _others)  # type: ignore[method-assign]
        at_exit(lambda: _close_all(_others))


def close_workers() -> None:
    """Ends the workers of all loaders that clusterddp made."""
    _close_all(_iterators)


def close(iterator: Any) -> None:
    """Ends an iterator's workers, if it has any. They finish their current sample or are killed.

    torch would wait 5 s for each worker that does not exit, send it a TERM, which is blocked there, and wait again.
    """
    workers: Sequence[Any] = getattr(iterator, "_workers", ())
    if not workers or iterator._shutdown or workers[0]._parent_pid != os.getpid():  # a fork: the parent owns them
        return
    if iterator._worker_pids_set:  # Otherwise torch raises in the main thread when a worker is killed.
        signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
        iterator._worker_pids_set = False
    killer = threading.Timer(_GRACE_S, lambda: [worker.kill() for worker in workers])
    killer.start()
    try:
        iterator._shutdown_workers()
    finally:
        killer.cancel()
    unlink_shared_tensors(worker.pid for worker in workers)


def _start(loader: DataLoader[Any], known: weakref.WeakSet[Any]) -> Any:
    with signals.blocked(loader), _beginning(loader):
        iterator = _iter_of_torch(loader)
    known.add(iterator)
    return iterator


@contextmanager
def _beginning(loader: DataLoader[Any]) -> Iterator[None]:
    """Has workers that are started inside begin with ``_Beginning``."""
    if not loader.num_workers:
        yield
        return
    given = loader.worker_init_fn
    loader.worker_init_fn = _Beginning(given, forked=signals.start_method(loader) == "fork")
    try:
        yield
    finally:
        loader.worker_init_fn = given


class _Beginning:
    """A ``worker_init_fn``, around the given one.

    The garbage collector leaves out the objects that a worker has when it begins, such as modules, because going
    through them takes tens of milliseconds each time, and copies the rank's memory.

    A worker that is not forked ends when its rank is killed. torch's end when their parent changes. The parent of a
    fork server's workers is that server, which lives as long as they do. A spawned one may lose its parent before it
    looks for the first time.
    """

    def __init__(self, given: Callable[[int], None] | None, forked: bool) -> None:
        self._given, self._forked = given, forked

    def __call__(self, worker: int) -> None:
        gc.freeze()
        if not self._forked:
            threading.Thread(target=_end_with_the_rank, name="rank", daemon=True).start()
        if self._given is not None:
            self._given(worker)


def _end_with_the_rank() -> None:
    if (rank := multiprocessing.parent_process()) is not None:
        rank.join()
        os._exit(1)


def _close_all(iterators: weakref.WeakSet[Any]) -> None:
    for iterator in list(iterators):
        close(iterator)
