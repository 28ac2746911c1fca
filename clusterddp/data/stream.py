"""Which rank sees which sample in which step: a function of (seed, step, rank), the same before and after a stop.

All samples form one endless stream, ordered by (seed, epoch): position p belongs to epoch p // n, and within it to that
epoch's permutation of the n samples. Step s of global batch B takes the positions from s * B on; rank r of them the
r-th part. An epoch's tail is filled from the next epoch, so that no rank is ever short, and any step is found at once.
"""

from __future__ import annotations

import difflib
import inspect
import math
import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils import signal_handling

from clusterddp.data import randomness
from clusterddp.errors import CheckpointError
from clusterddp.process import at_exit
from clusterddp.worker import signals

#: Seconds that workers get to finish the sample at hand when their loop ends, before they are killed.
_WORKER_GRACE_S = 1.0
_OWN_OPTIONS = {"sampler", "batch_sampler", "drop_last"}


class SampleOrder:
    """The endless stream of (epoch, index)."""

    def __init__(self, length: int, seed: int, shuffle: bool) -> None:
        self._length, self._seed, self._shuffle = length, seed, shuffle
        self._epoch, self._indices = -1, torch.empty(0, dtype=torch.int64)

    def samples(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The samples at the positions from ``start`` to before ``stop``."""
        result: list[tuple[int, int]] = []
        while start < stop:
            epoch, offset = divmod(start, self._length)
            indices = self._permutation(epoch)[offset : offset + stop - start].tolist()
            result += [(epoch, index) for index in indices]
            start += len(indices)
        return result

    def _permutation(self, epoch: int) -> torch.Tensor:
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(randomness.hash32("order", self._seed, epoch))
            in_order = torch.arange(self._length)
            self._indices = torch.randperm(self._length, generator=generator) if self._shuffle else in_order
            self._epoch = epoch
        return self._indices


class _SeededSamples(Dataset[Any]):
    """Seeds every generator before each sample, with (seed, epoch, index): whatever worker reads it, it is the same."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitem__(self, sample: tuple[int, int]) -> Any:
        randomness.seed_all(randomness.hash32("sample", self._seed, *sample))
        return self._dataset[sample[1]]


class _Batches:
    """The batch sampler of one rank: the samples of each step from ``step`` on, for ever."""

    def __init__(self, order: SampleOrder, step: int, global_batch: int, rank: int, world_size: int) -> None:
        self._order, self._step, self._global_batch = order, step, global_batch
        self._rank, self._share = rank, global_batch // world_size

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        step = self._step
        while True:
            start = step * self._global_batch + self._rank * self._share
            yield self._order.samples(start, start + self._share)
            step += 1


_iter_of_torch = DataLoader.__iter__


class _SteadyDataLoader(DataLoader[Any]):
    """A DataLoader whose workers never see the stop signals, and are known to ``close_workers``."""

    def __iter__(self) -> Any:
        iterator = _iter_without_signals(self)
        _iterators.add(iterator)
        return iterator


def _iter_without_signals(loader: DataLoader[Any]) -> Any:
    with signals.blocked(loader):
        return _iter_of_torch(loader)


def guard_workers() -> None:
    """From now on no DataLoader's workers see the stop signals, those of the script's own loaders neither.

    torch's workers die of a TERM, and their rank fails with them, before it can save. When the process ends, a TERM
    does not end them either, and Python would wait for them: they are closed before.
    """
    if DataLoader.__iter__ is _iter_of_torch:
        DataLoader.__iter__ = _iter_and_remember  # type: ignore[method-assign]
        at_exit(_close_others)


def _iter_and_remember(loader: DataLoader[Any]) -> Any:
    iterator = _iter_without_signals(loader)
    _others.add(iterator)
    return iterator


class Loader:
    """The training samples of this rank; ``Context.loader`` makes it, ``Run.steps`` draws from it.

    ``batch_size`` samples per rank and step, at the world size of the run's first attempt; then, and where the job says
    ``global_batch``, that stays whatever the world size, and ``batch_size`` is the most that a rank takes at a time.
    """

    #: Whether every rank must take part in a save; and why a resume may not be exact.
    together = False
    doubts: tuple[str, ...] = ()

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        rank: int,
        world_size: int,
        global_batch: int | None = None,
        **options: Any,
    ) -> None:
        _check_options(options)
        self.dataset = dataset
        self.length = _length(dataset)
        batch_size = _positive(batch_size)
        if global_batch is not None and global_batch % world_size:
            raise ValueError(f"global_batch is {global_batch}, which {world_size} ranks cannot share evenly")
        self.batch_size = batch_size
        self.global_batch = global_batch or batch_size * world_size
        self._asked = global_batch
        self._order = SampleOrder(self.length, seed, shuffle)
        self._samples = _SeededSamples(dataset, seed)
        self._rank, self._world_size, self._options = rank, world_size, options
        DataLoader(self._samples, batch_sampler=[], **options)  # refuses values here that it would refuse in the loop

    def gather(self) -> None:
        """Nothing: where a rank is follows from the step."""

    def progress(self, step: int) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {
            "epoch": self.epoch(step),
            "samples": step * self.global_batch,
            "global_batch": self.global_batch,
            "dataset_length": self.length,
        }

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Takes over the recorded global batch of the run, whatever the world size is now.

        Raises CheckpointError when the order of the samples could not be kept.
        """
        if "dataset_length" not in progress:
            raise CheckpointError("the run began with a loader of its own: give run() that one again")
        global_batch, length = progress["global_batch"], progress["dataset_length"]
        if length != self.length:
            raise CheckpointError(
                f"the run began with {length} samples, the dataset now has {self.length}: their order would not be "
                "the same; give the same dataset, or begin a new run"
            )
        if self._asked not in (None, global_batch):
            raise CheckpointError(
                f"the run began with a global batch of {global_batch} samples, global_batch is now {self._asked}: the "
                "order of the samples would not be the same; leave it as it was, or begin a new run"
            )
        if global_batch % self._world_size:
            raise CheckpointError(
                f"the run's global batch of {global_batch} samples cannot be split evenly over {self._world_size} "
                "ranks; use a number of ranks that divides it"
            )
        self.global_batch = global_batch

    @property
    def share(self) -> int:
        """This rank's samples of a step."""
        return self.global_batch // self._world_size

    def epoch(self, step: int) -> int:
        """The epoch that the first sample of a step belongs to."""
        return step * self.global_batch // self.length

    def ends_epoch(self, step: int) -> bool:
        """Whether a step takes the last sample of an epoch."""
        return self.epoch(step + 1) > self.epoch(step)

    def steps_in(self, epochs: float) -> int:
        """The number of steps that take every sample ``epochs`` times: the last one is filled from the next epoch."""
        return -int(-epochs * self.length // self.global_batch)

    def batches(self, step: int) -> Iterator[Any]:
        """This rank's batches from ``step`` on, endlessly. Closing the iterator ends its workers."""
        batches = _Batches(self._order, step, self.global_batch, self._rank, self._world_size)
        loader = _SteadyDataLoader(self._samples, batch_sampler=batches, **self._options)
        iterator = iter(loader)
        try:
            while True:
                # Samples fetched in this process would leave their seeds in the user's generators.
                with randomness.preserved():
                    batch = next(iterator)
                yield batch
        finally:
            close(iterator)


class EvalLoader:
    """Every sample once over all ranks: rank r has samples r, r + world_size, ... in order, tails kept.

    ``at_batch`` is called before each batch, the same number of times on every rank, also on one whose share is a batch
    shorter: a place where all ranks can stop together.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        rank: int,
        world_size: int,
        at_batch: Callable[[], None],
        **options: Any,
    ) -> None:
        _check_options(options)
        batch_size = _positive(batch_size)
        length = _length(dataset)
        share = range(rank, length, world_size)
        self.dataset = dataset
        self._loader = _SteadyDataLoader(dataset, batch_size=batch_size, sampler=share, **options)
        self._most = math.ceil(math.ceil(length / world_size) / batch_size)
        self._at_batch = at_batch

    def __len__(self) -> int:
        """The number of batches of this rank."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self._loader)
        try:
            for number in range(self._most):
                self._at_batch()
                if number < len(self):
                    yield next(iterator)
        finally:
            if not self._loader.persistent_workers:
                close(iterator)


#: The iterators that may have workers: of the loaders made here, and of the script's own.
_iterators: weakref.WeakSet[Any] = weakref.WeakSet()
_others: weakref.WeakSet[Any] = weakref.WeakSet()


def _close_others() -> None:
    _close_all(_others)


def close_workers() -> None:
    """Ends the workers of every loader made here: none outlives its rank, none delays its end."""
    _close_all(_iterators)


def _close_all(iterators: weakref.WeakSet[Any]) -> None:
    for iterator in list(iterators):
        close(iterator)


def close(iterator: Any) -> None:
    """Ends an iterator's workers, if it has any: they finish the sample at hand, or are killed.

    torch would wait 5 s for each that does not come, then send it a TERM, which is blocked there, and wait again.
    """
    workers: Sequence[Any] = getattr(iterator, "_workers", ())
    if not workers or iterator._shutdown or workers[0]._parent_pid != os.getpid():  # a forked child's parent has them
        return
    if iterator._worker_pids_set:  # Else torch raises in the main thread when it hears that a worker was killed.
        signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
        iterator._worker_pids_set = False
    killer = threading.Timer(_WORKER_GRACE_S, lambda: [worker.kill() for worker in workers])
    killer.start()
    try:
        iterator._shutdown_workers()
    finally:
        killer.cancel()


def _positive(batch_size: int) -> int:
    try:
        number = operator.index(batch_size)
    except TypeError:
        raise TypeError(f"batch_size is {batch_size!r}: expected an integer") from None
    if number < 1:
        raise ValueError(f"batch_size is {number}; it is the number of samples per rank and step, 1 or more")
    return number


def _check_options(options: dict[str, Any]) -> None:
    known = inspect.signature(DataLoader.__init__).parameters
    for name in sorted(options.keys() - known.keys()):
        nearest = "".join(f"; did you mean {near}?" for near in difflib.get_close_matches(name, known, 1))
        raise TypeError(f"{name!r} is no option of the loader, nor of torch's DataLoader{nearest}")
    if clash := _OWN_OPTIONS & options.keys():
        raise TypeError(
            f"{', '.join(sorted(clash))}: clusterddp orders the samples; leave it out, or loop over a DataLoader "
            "of your own with ctx.stop_requested()"
        )


def _length(dataset: Dataset[Any]) -> int:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"{type(dataset).__name__} has no length and no index: a run cannot find its place in it again. Give a "
            "dataset with __len__ and __getitem__, or loop over a DataLoader of your own with ctx.stop_requested()"
        )
    if not len(dataset):
        raise ValueError(f"the dataset ({type(dataset).__name__}) has no samples")
    return len(dataset)
