"""Which rank sees which sample in which step: a pure function of (seed, step, rank), so that a resume is exact.

All samples form one endless stream, ordered by (seed, epoch): position p belongs to epoch p // n, and within it to that
epoch's permutation of the n samples. Step s with global batch B takes positions s * B to (s + 1) * B - 1, and each rank
its slice of them. An epoch's last step is filled from the next epoch, so that no rank is ever short of samples, and any
step can be found in constant time.
"""

from __future__ import annotations

import difflib
import inspect
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from clusterddp.data import randomness
from clusterddp.data.workers import ShieldedDataLoader, close
from clusterddp.errors import CheckpointError

_OWN_OPTIONS = {"sampler", "batch_sampler", "drop_last"}


class SampleOrder:
    """The endless stream of (epoch, index)."""

    def __init__(self, length: int, seed: int, shuffle: bool) -> None:
        self._length, self._seed, self._shuffle = length, seed, shuffle
        self._epoch, self._indices = -1, torch.empty(0, dtype=torch.int64)

    def samples(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The samples at positions ``start`` to ``stop`` - 1."""
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
    """Seeds all generators from (seed, epoch, index) before each sample, so that it does not depend on the worker."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitem__(self, sample: tuple[int, int]) -> Any:
        randomness.seed_all(randomness.hash32("sample", self._seed, *sample))
        return self._dataset[sample[1]]


class Loader:
    """The training samples of this rank: made by ``Context.loader``, read by ``Run.steps``.

    Attributes:
        dataset: the dataset.
        length: its number of samples.
        batch_size: samples per rank and step; if the world size changed, or the job sets ``global_batch``, the largest
            number that a rank takes at once (see ``Run.micro``).
        global_batch: samples per step over all ranks. Fixed by the run's first attempt.
    """

    per_rank_state = False

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
        self.length, self.batch_size = _checked(dataset, batch_size, options)
        self.dataset = dataset
        if global_batch is not None and global_batch % world_size:
            raise ValueError(f"global_batch is {global_batch}, which {world_size} ranks cannot share evenly")
        self.global_batch = global_batch or self.batch_size * world_size
        self.inexact: list[str] = []
        self._asked = global_batch
        self._order = SampleOrder(self.length, seed, shuffle)
        self._samples = _SeededSamples(dataset, seed)
        self._rank, self._world_size, self._options = rank, world_size, options
        DataLoader(self._samples, batch_sampler=[], **options)  # rejects bad values here rather than in the loop

    def gather(self) -> None:
        """Nothing to do: the position follows from the step."""

    def progress(self, step: int) -> dict[str, Any]:
        """What a checkpoint stores about the loader."""
        return {
            "epoch": self.epoch(step),
            "samples": step * self.global_batch,
            "global_batch": self.global_batch,
            "dataset_length": self.length,
        }

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Takes over the run's global batch, at any world size.

        Raises CheckpointError when the sample order could not be kept.
        """
        if "dataset_length" not in progress:
            started = "with your own loader: pass that loader to ctx.run() again"
            if "loaders" not in progress:
                started = "without a loader: leave out loader= in ctx.run(), or start a new run"
            raise CheckpointError(f"the run started {started}")
        global_batch, length = progress["global_batch"], progress["dataset_length"]
        if length != self.length:
            raise CheckpointError(
                f"the run started with {length} samples, the dataset now has {self.length}: the sample order would "
                "change; use the same dataset, or start a new run"
            )
        if self._asked not in (None, global_batch):
            raise CheckpointError(
                f"the run started with a global batch of {global_batch} samples, global_batch is now {self._asked}: "
                "the sample order would change; keep the old value, or start a new run"
            )
        if global_batch % self._world_size:
            raise CheckpointError(
                f"the run's global batch of {global_batch} samples cannot be split evenly over {self._world_size} "
                "ranks; use a number of ranks that divides it"
            )
        self.global_batch = global_batch

    @property
    def share(self) -> int:
        """Samples per rank and step."""
        return self.global_batch // self._world_size

    def epoch(self, step: int) -> int:
        """The epoch that the first sample of a step belongs to."""
        return step * self.global_batch // self.length

    def ends_epoch(self, step: int) -> bool:
        """Whether a step takes the last sample of an epoch."""
        return self.epoch(step + 1) > self.epoch(step)

    def steps_in(self, epochs: float) -> int:
        """The number of steps in so many epochs; the last one is filled from the next epoch."""
        return -int(-epochs * self.length // self.global_batch)

    def _batches(self, step: int) -> Iterator[list[tuple[int, int]]]:
        """This rank's samples of each step from ``step`` on, without end."""
        for number in itertools.count(step):
            start = number * self.global_batch + self._rank * self.share
            yield self._order.samples(start, start + self.share)

    def batches(self, step: int) -> Iterator[Any]:
        """This rank's batches from ``step`` on, without end. Closing the iterator ends its workers."""
        iterator = iter(ShieldedDataLoader(self._samples, batch_sampler=self._batches(step), **self._options))
        try:
            while True:
                # Samples fetched in this process would leave their seeds in the script's generators.
                with randomness.preserved():
                    batch = next(iterator)
                yield batch
        finally:
            close(iterator)


class EvalLoader:
    """The evaluation samples of this rank, each once over all ranks: made by ``Context.eval_loader``.

    Rank r has samples r, r + world_size, ... in order. ``at_batch`` is called before each batch, equally often on every
    rank, even where a rank's share is a batch shorter: all ranks can stop together there. ``len()`` is this rank's
    number of batches.

    Attributes:
        dataset: the dataset.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        rank: int,
        world_size: int,
        at_batch: Callable[[], None],
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
        **options: Any,
    ) -> None:
        length, batch_size = _checked(dataset, batch_size, options)
        share = range(rank, length, world_size)
        self.dataset = dataset
        self._loader = ShieldedDataLoader(dataset, batch_size=batch_size, sampler=share, **options)
        self._most = math.ceil(math.ceil(length / world_size) / batch_size)
        self._at_batch, self._around = at_batch, around

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        with self._around():
            yield from self._batches()

    def _batches(self) -> Iterator[Any]:
        iterator = iter(self._loader)
        try:
            for number in range(self._most):
                self._at_batch()
                if number < len(self):
                    yield next(iterator)
        finally:
            if not self._loader.persistent_workers:
                close(iterator)


def _checked(dataset: Dataset[Any], batch_size: int, options: dict[str, Any]) -> tuple[int, int]:
    """The length of the dataset and the batch size. Raises TypeError or ValueError."""
    known = inspect.signature(DataLoader.__init__).parameters
    for name in sorted(options.keys() - known.keys()):
        nearest = "".join(f"; did you mean {near}?" for near in difflib.get_close_matches(name, known, 1))
        raise TypeError(f"{name!r} is not an option of the loader or of torch's DataLoader{nearest}")
    if clash := _OWN_OPTIONS & options.keys():
        raise TypeError(
            f"{', '.join(sorted(clash))}: clusterddp orders the samples; leave it out, or loop over your own "
            "DataLoader with ctx.stop_requested()"
        )
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"{type(dataset).__name__} has no length and no index, so a run cannot resume in it: use a dataset "
            "with __len__ and __getitem__, or give ctx.run() a loader with state_dict() and load_state_dict(), or loop "
            "over your own DataLoader with ctx.stop_requested()"
        )
    try:
        number = operator.index(batch_size)
    except TypeError:
        raise TypeError(f"batch_size is {batch_size!r}: expected an integer") from None
    if number < 1:
        raise ValueError(f"batch_size is {number}: expected the number of samples per rank and step, 1 or more")
    if not len(dataset):
        raise ValueError(f"the dataset ({type(dataset).__name__}) has no samples")
    return len(dataset), number
