"""Loops other than ``run.steps()``: all ranks stop at the same call of ``clusterddp.stop_requested()``.

In a training loop of the script's own, which saves by itself, these calls are its steps. It needs no context and no
process group: the ranks agree through the store of their attempt, which the context has opened, or else the first call
opens. In a step of ``run.steps()``, as in an evaluation, the run saves instead.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from clusterddp import environment, protocol
from clusterddp.data.workers import close_workers, shield_workers
from clusterddp.distributed.process_group import AttemptStore
from clusterddp.errors import Stopped
from clusterddp.history.checkpoints import NoSave, Saved
from clusterddp.history.event import Reported
from clusterddp.history.steps import NO_RANK
from clusterddp.process import at_exit, cancel_at_exit
from clusterddp.reporter import say
from clusterddp.training import script_steps, settings
from clusterddp.training.epoch_items import EpochItems, Item
from clusterddp.training.heartbeat import Heartbeat
from clusterddp.training.stopping import Agreement, Stopping, open_store
from clusterddp.worker import rank_process
from clusterddp.worker.control_channel import tell_of_child
from clusterddp.worker.rank_process import RankProcess
from clusterddp.worker.signals import STOP_SIGNALS, described

if TYPE_CHECKING:
    from clusterddp.training.loop import Run

#: A file or folder that the script has saved.
SavedPath = str | os.PathLike[str]


class ScriptLoop:
    """What the functions below do in one process. A step is what lies between two calls of ``stop_requested``.

    ``report`` adds an event to the history, on any rank. ``alone``: there is no context.
    """

    #: Set by ``ctx.run()``. The steps are then those of the run.
    run: Run | None = None

    def __init__(
        self,
        process: RankProcess,
        store: AttemptStore,
        agreement: Agreement,
        heartbeat: Heartbeat,
        report: Callable[[Reported], None],
        step_done: Callable[[], None] = lambda: None,
        *,
        alone: bool = False,
    ) -> None:
        self._process, self.alone = process, alone
        self._rank, self._store, self._agreement = store.rank, store.store, agreement
        self._heartbeat, self._report, self._step_done = heartbeat, report, step_done
        self._calls = 0
        #: The last file of ``requeue(saved=...)``, and whether it existed.
        self._last_save: tuple[Path, bool] | None = None
        #: How many items of the epoch it had trained on when it was asked to stop.
        self._items: int | None = None
        #: Whether it has read the save of the previous attempt; None if that is unknown.
        self._read: bool | None = None

    @property
    def steps(self) -> int:
        """The steps of the run, or else of this attempt, so far."""
        return self.run.step if self.run is not None else max(0, self._calls - 1)

    def stop_requested(self) -> bool:
        """See ``stop_requested`` below."""
        stop = self._end_step() if self.run is None else self.run.at_boundary()
        if stop:
            self._process.training.stop_reason = self._agreement.reason or ""
        return stop

    def _end_step(self) -> bool:
        self._calls += 1
        if self._calls == 1:
            self._heartbeat.begin()
        else:
            self._step_done()
        if self._calls == 2 and (watch := self._process.resume_watch) is not None:
            self._read = watch.end()  # the script has read its save before its first step
        stop = self._agreement.boundary()
        if stop:
            self._items = _epoch(self._process).done
            self._heartbeat.rest()  # the script saves now
        return stop

    def requeue(self, saved: SavedPath | None) -> NoReturn:
        """See ``requeue`` below."""
        if self._rank == 0 and saved is not None:
            self._report_save(Path(saved).absolute())
        reason = self._agreement.reason or "requested by the script"
        if self.run is not None:
            self.run.stop(reason)
        close_workers()
        raise Stopped(None, reason)

    def _report_save(self, file: Path) -> None:
        exists = file.exists()
        if (file, exists) == self._last_save:  # a script that catches Stopped calls ``requeue`` again
            return
        if not exists:
            self._report(NoSave(file=str(file)))
        elif self._items is None:
            self._report(Saved(file=str(file)))
        else:
            self._report(Saved(file=str(file), items=self._items, written=file.stat().st_mtime))
        self._last_save = file, exists

    def items_done(self, recorded: int) -> int:
        """How many items of the epoch the state that the script has loaded was trained on. All ranks call it.

        ``recorded``: those at the last stop. Rank 0 sets 0 if the script has not opened the save of that stop.
        """
        if self._rank == 0:
            watch = self._process.resume_watch
            read = self._read if watch is None or watch.ended else watch.was_opened()
            self._store.set(_ITEMS_DONE, str(0 if read is False else recorded))
        return int(self._store.get(_ITEMS_DONE))


#: Key of the attempt's store.
_ITEMS_DONE = "epoch/items_done"


def stop_requested() -> bool:
    """Whether to save and stop here, in any loop but that over ``run.steps()``. All ranks call it equally often.

    It returns the same answer on all ranks at the same call, without a collective and without ``clusterddp.init()``,
    whatever process group the script has made. It takes microseconds until a stop is requested.

    In a training loop that saves by itself, call it once per step. From the first call on, stop signals end no rank.
    After an answer of True, save and call ``clusterddp.requeue()``.

    In a step of ``run.steps()``, it lets the run stop in a loop that takes long, such as an evaluation without
    ``ctx.eval_loader()``: ``if clusterddp.stop_requested(): run.stop("in the evaluation")``. Evaluate before the step's
    training (a resume repeats the step) or after its optimizer and scheduler have stepped (a resume continues with the
    next step).

    Returns False in a process that no ``clusterddp submit`` has started, unless ``clusterddp.init()`` was called.

    Raises RuntimeError outside the main thread. LauncherEnvironmentError when rank 0 cannot be reached at the first
    call. ClusterddpError when a stop was requested and rank 0 is lost.

    Example::

        if clusterddp.stop_requested():
            torch.save(state, "last.pt")
            clusterddp.requeue(saved="last.pt")
    """
    loop = _loop(rank_process.current())
    if loop is None:
        _tell_if_started_by_a_rank()
        return False
    return loop.stop_requested()


def requeue(saved: SavedPath | None = None) -> None:
    """Ends this attempt as stopped rather than completed, so that the run continues later. All ranks call it.

    After ``ctx.run()``, it saves the run, too, as ``run.stop()`` does.

    Args:
        saved: the file or folder from which the script will continue, for the history. The next attempt warns if the
            script completes its first step without opening it.

    Returns only in a process that no ``clusterddp submit`` has started, unless ``clusterddp.init()`` was called.

    Raises Stopped, a SystemExit, in all others.

    Example::

        clusterddp.requeue(saved="last.pt")
    """
    if (loop := _loop(rank_process.current())) is not None:
        loop.requeue(saved)


def continue_epoch(items: Iterable[Item]) -> Iterable[Item]:
    """The items of an epoch, without those that were trained on before the run stopped in the middle of it.

    For a script that can only resume at the beginning of an epoch. On all ranks, it goes around the whole iterable of
    the training loop, ``enumerate`` and progress bar included, so that their numbers stay right. At a stop, save what
    makes the script resume at the beginning of the current epoch. In the first epoch of the next attempt, the items
    that had been trained on are then loaded and skipped, provided that the script has opened the file of
    ``requeue(saved=...)``. These are the same items if the order of the epoch is the same, as with
    ``DistributedSampler.set_epoch()``. If none is left, the last one is trained on again.

    An item has been trained on if an optimizer has stepped since it was taken. Outside of a run, all items are
    yielded. ``len()`` is that of ``items``, the whole epoch.

    Raises LauncherEnvironmentError when rank 0 cannot be reached.

    Example::

        for step, batch in clusterddp.continue_epoch(enumerate(loader)):
            train(batch)
            if clusterddp.stop_requested():
                torch.save({"model": model.state_dict(), "epoch": epoch}, "last.pt")
                clusterddp.requeue(saved="last.pt")
    """
    process = rank_process.current()
    return ItemsToDo(process, items) if _is_rank(process) else items


class ItemsToDo(Iterable[Item]):
    """The remaining items of an epoch."""

    def __init__(self, process: RankProcess, items: Iterable[Item]) -> None:
        self._process, self._items = process, items

    def __iter__(self) -> Iterator[Item]:
        recorded = int(os.environ.pop(protocol.SAVED_ITEMS, "0"))  # for the first epoch of the attempt alone
        loop = _loop(self._process) if recorded else None
        return _epoch(self._process).iterate(self._items, 0 if loop is None else loop.items_done(recorded))

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]  # TypeError where the items have no length


def _is_rank(process: RankProcess) -> bool:
    return process.loop is not None or process.supervised


def _loop(process: RankProcess) -> ScriptLoop | None:
    """The loop of the context or, without one, a loop that the first call begins. None in a process that is no rank."""
    if isinstance(process.loop, ScriptLoop):
        return process.loop
    return _begin(process) if process.supervised else None


def _epoch(process: RankProcess) -> EpochItems:
    if not isinstance(process.epoch, EpochItems):
        process.epoch = EpochItems()
    return process.epoch


@functools.cache
def _tell_if_started_by_a_rank() -> None:
    environment.drop_inherited(os.environ)
    if protocol.SUPERVISOR in os.environ:
        say(NO_RANK)
        tell_of_child(os.environ)


def began(process: RankProcess) -> bool:
    """Whether it has a loop without a context."""
    return isinstance(process.loop, ScriptLoop) and process.loop.alone


def _begin(process: RankProcess) -> ScriptLoop:
    """Connects this rank with the others, as ``clusterddp.init()`` does, but for the process group."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "clusterddp.stop_requested() must be called in the main thread, because it installs signal handlers"
        )
    read = settings.of_rank(process)
    assert read.attempt is not None
    _tell_of_handlers()
    store = open_store(process, read)
    stopping = Stopping(process, read, store, process.report)
    shield_workers()
    steps = script_steps.current(process)
    steps.by_calls()
    process.loop = loop = ScriptLoop(
        *(process, store, stopping.agreement, steps.heartbeat, process.report, steps.step_done), alone=True
    )

    def close() -> None:
        # sys.last_value is set by the interpreter once it has printed an uncaught exception.
        failed = getattr(sys, "last_value", None) is not None
        cancel_at_exit(close)
        stopping.close(restore_handlers=False)
        if not failed:
            store.close()

    at_exit(close)
    return loop


def _tell_of_handlers() -> None:
    for number in STOP_SIGNALS:
        handler = signal.getsignal(number)
        if callable(handler) and not str(getattr(handler, "__module__", "")).startswith("clusterddp."):
            name = number.name.removeprefix("SIG")
            say(f"clusterddp.stop_requested() replaced the script's {name} handler, {described(handler)}")
