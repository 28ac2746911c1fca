"""The methods of ``ctx`` that make loaders, and the order that their arguments choose, named as in torch's DataLoader.

The user's own ``Sampler`` or ``batch_sampler`` becomes an order: it is drawn once per epoch, under a seed made from the
epoch. It must return the same samples whenever an epoch is drawn again, because a resumed run does that. Two epochs are
drawn in turn to check it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from clusterddp.data import randomness
from clusterddp.data.loader import EvalLoader, Loader, check_switches
from clusterddp.data.sample_order import (
    Binding,
    BoundOrder,
    Order,
    Sequential,
    Shuffled,
    Weighted,
    short_hash,
)

_REMEDY = (
    "Draw from the global generators of torch, random or numpy, which are seeded for each epoch, use the number given "
    "to set_epoch(), or choose one of clusterddp.orders"
)


class Sampled(Order):
    """``batch_size``: that of the batches, if the sampler yields batches rather than single samples."""

    def __init__(self, sampler: Iterable[Any], batch_size: int | None = None) -> None:
        self._sampler, self._batch_size = sampler, batch_size
        self._argument = "sampler" if batch_size is None else "batch_sampler"
        self._name = type(sampler).__name__
        if not isinstance(sampler, Iterable):
            raise TypeError(f"{self._argument} is {sampler!r}, expected a torch Sampler, or an iterable of indices")
        self._checked = False

    def bind(self, to: Binding) -> BoundOrder:
        self._most = 10**6 + 100 * to.length
        first = self._draw(0, to.seed)
        if not self._checked:
            self._check(first, to.seed)
        return _Drawn(f"{self._name} ({len(first)} per epoch, hash {short_hash(first)})", len(first), self, to)

    def _check(self, first: list[Any], seed: int) -> None:
        """Raises ValueError for a sampler that is not deterministic in the epoch."""
        if not first:
            raise ValueError(f"{self._argument}: {self._name} yields no samples")
        second = self._draw(1, seed)
        if len(first) != len(second):
            raise ValueError(
                f"{self._argument}: {self._name} yields {len(first)} samples in epoch 0 but {len(second)} in epoch 1. "
                "Expected the same number in every epoch, because a resumed run finds its place by that number"
            )
        if first != self._draw(0, seed):
            raise ValueError(
                f"{self._argument}: {self._name} is not deterministic: epoch 0 differed when redrawn, so a resumed run "
                f"could not continue it. It has hidden state or its own generator. {_REMEDY}"
            )
        self._checked = True

    def epoch(self, number: int, seed: int, length: int) -> list[Any]:
        """The samples of an epoch. Raises ValueError if their number is not ``length``."""
        found = self._draw(number, seed)
        if len(found) != length:
            raise ValueError(
                f"{self._argument}: {self._name} yields {len(found)} samples in epoch {number}, but {length} in epoch "
                "0. Expected the same number in every epoch"
            )
        return found

    def _draw(self, epoch: int, seed: int) -> list[Any]:
        number = randomness.hash32("sampler", seed, epoch)
        with randomness.preserved():
            randomness.seed_all(number)
            for part in _parts(self._sampler):
                if hasattr(part, "set_epoch"):
                    part.set_epoch(epoch)
                if isinstance(generator := getattr(part, "generator", None), torch.Generator):
                    generator.manual_seed(number)
            found = list(islice(self._samples(), self._most + 1))
        if len(found) > self._most:
            raise ValueError(
                f"{self._argument}: {self._name} yielded {self._most} samples and did not end, but an epoch must end"
            )
        return found

    def _samples(self) -> Iterator[Any]:
        if self._batch_size is None:
            yield from map(_plain, self._sampler)
            return
        for batch in self._sampler:
            if len(batch) != self._batch_size:
                raise ValueError(
                    f"batch_sampler: {self._name} yielded a batch of {len(batch)} samples, but batch_size is "
                    f"{self._batch_size}. Expected only batches of that size. Make it drop a smaller last batch"
                )
            yield from map(_plain, batch)


class _Drawn(BoundOrder):
    repeats = True

    def __init__(self, label: str, length: int, sampler: Sampled, to: Binding) -> None:
        super().__init__(label, to.of_epoch(length))
        self._epoch = lru_cache(2)(lambda number: sampler.epoch(number, to.seed, length))

    def indices(self, epoch: int, start: int, stop: int) -> list[Any]:
        return self._epoch(epoch)[start:stop]


def _parts(sampler: Any) -> list[Any]:
    """A sampler and those within it, as in a BatchSampler, each once: torch's, and others that take an epoch."""
    found = [sampler]
    for part in found:  # also over those that are appended
        for inner in list(getattr(part, "__dict__", {}).values()):
            takes_epoch = hasattr(inner, "set_epoch") and not hasattr(inner, "__getitem__")  # which a dataset has
            is_sampler = isinstance(inner, Sampler) or takes_epoch
            if is_sampler and not any(inner is other for other in found):
                found.append(inner)
    return found


def _plain(index: Any) -> Any:
    """An index of torch or numpy as Python's, and any other key as it is."""
    try:
        return operator.index(index)
    except TypeError:
        return index


def chosen(
    dataset: Any,
    batch_size: int,
    *,
    shuffle: bool | None = None,
    order: Order | None = None,
    sampler: Iterable[Any] | None = None,
    batch_sampler: Iterable[Any] | None = None,
) -> Order:
    """The order that the arguments of ``ctx.loader`` request.

    Raises TypeError if they request two, for samplers that divide the samples among the ranks, and for a dict of
    datasets.
    """
    given = {"shuffle": shuffle, "order": order, "sampler": sampler, "batch_sampler": batch_sampler}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise TypeError(f"{' and '.join(names)} each set the order of the samples. Give ctx.loader() only one of them")
    if order is not None:
        if not isinstance(order, Order):
            raise TypeError(f"order is {order!r}, expected one of clusterddp.orders, such as orders.weighted(weights)")
        return order
    if sampler is not None:
        return _of_sampler(sampler, dataset)
    if batch_sampler is not None:
        return _of_batch_sampler(batch_sampler, batch_size, dataset)
    if isinstance(dataset, Mapping) and dataset and 0 not in dataset:
        listed = ", ".join(map(repr, islice(dataset, 3))) + ", ..." * (len(dataset) > 3)
        raise TypeError(
            f"the dataset is a dict with {listed}. Pass one of its datasets, or all of them as a "
            "torch.utils.data.ConcatDataset"
        )
    return Sequential() if shuffle is False else Shuffled()


def _of_sampler(sampler: Any, dataset: Any) -> Order:
    """A clusterddp order that does the same as torch's sampler without a list of samples, or the sampler itself."""
    _refuse_shares(sampler)
    if type(sampler) is WeightedRandomSampler and sampler.replacement:
        return Weighted(sampler.weights, None, sampler.num_samples)
    whole = hasattr(dataset, "__len__") and hasattr(sampler, "__len__") and len(sampler) == len(dataset)
    if type(sampler) is SequentialSampler and whole:
        return Sequential()
    if (
        type(sampler) is RandomSampler
        and whole
        and not sampler.replacement
        and len(sampler.data_source) == len(sampler)
    ):
        return Shuffled()
    return Sampled(sampler)


def _of_batch_sampler(sampler: Any, batch_size: int, dataset: Any) -> Order:
    _refuse_shares(sampler)
    if type(sampler) is not BatchSampler or sampler.drop_last:
        return Sampled(sampler, batch_size)
    if sampler.batch_size != batch_size:
        raise ValueError(
            f"batch_size is {batch_size}, but batch_sampler has batch_size {sampler.batch_size}. Make them equal"
        )
    return _of_sampler(sampler.sampler, dataset)


def _refuse_shares(sampler: Any) -> None:
    """Raises TypeError for a sampler, or one within a batch sampler, that gives each rank its part."""
    for part in (sampler, getattr(sampler, "sampler", None)):
        numbers = [getattr(part, name, None) for name in ("num_replicas", "world_size")]
        divides = any(isinstance(number, int) and number > 1 for number in numbers)
        if divides or isinstance(part, DistributedSampler):
            raise TypeError(
                f"{type(part).__name__} gives each rank its part of the samples, but ctx.loader() does that itself. "
                "Leave it out, with shuffle=False if it did not shuffle, or give ctx.loader() a sampler of all samples"
            )


class Loaders:
    """The part of ``Context`` that makes loaders, documented there."""

    rank: int
    world_size: int
    seed: int
    device: torch.device
    #: Of the job definition: samples per step over all ranks.
    _global_batch: int | None

    def _stop_in_evaluation(self) -> None:
        """Between two batches of an evaluation."""
        raise NotImplementedError

    def _evaluating(self) -> AbstractContextManager[None]:
        """Around an evaluation."""
        raise NotImplementedError

    def loader(
        self,
        dataset: Dataset[Any] | Sequence[Any] | Mapping[str, Any],
        batch_size: int,
        *,
        shuffle: bool | None = None,
        order: Order | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        drop_last: bool = False,
        to_device: bool = True,
        **options: Any,
    ) -> Loader:
        """The training samples of this rank, for ``ctx.run``, in an order that a resumed run continues exactly.

        Each sample is read with its own seed, so that random augmentation does not depend on the number of workers.

        Args:
            dataset: with ``__len__`` and ``__getitem__``.
            batch_size: samples per rank and step. If the job sets ``global_batch``, or the number of ranks changed, a
                rank's share of a step is the global batch divided by the ranks, and ``batch_size`` the most that
                ``run.micro`` yields at once.
            shuffle: whether each epoch has its own random order. True if neither it nor an order is given.
            order: one of ``clusterddp.orders``, instead of ``shuffle``.
            sampler: a torch Sampler of all samples, instead of an order, that draws an epoch again in the same way:
                from the global generators, which are seeded, or by ``set_epoch``.
            batch_sampler: the same for batches of ``batch_size`` samples. A step takes one per rank.
            drop_last: ends each epoch at a whole global batch, and leaves out the rest of its samples. Without it, the
                last step of an epoch is filled from the next epoch.
            to_device: on a GPU, yields batches whose tensors are on this rank's device, copied on a separate stream,
                with workers a step ahead. ``.to(ctx.device)`` then has no effect. Only tensors in tuples, lists and
                dicts are copied. Pass False for batches that the script reads on the CPU.
            options: of torch's DataLoader, such as ``num_workers``. On a GPU, ``pin_memory`` is on unless they set it.
                A dataset without workers may return tensors on the device.

        Raises TypeError for a dataset without a length, for unknown options, switches that are neither True nor False,
        two orders and a DistributedSampler.
        ValueError for an empty dataset, an order that does not fit it, a sampler with hidden state, and a global
        batch that the ranks cannot share evenly.
        """
        check_switches(shuffle=shuffle, to_device=to_device)
        return Loader(
            dataset,
            batch_size,
            order=chosen(
                dataset, batch_size, shuffle=shuffle, order=order, sampler=sampler, batch_sampler=batch_sampler
            ),
            drop_last=drop_last,
            seed=self.seed,
            rank=self.rank,
            world_size=self.world_size,
            global_batch=self._global_batch,
            device=self.device if to_device else None,
            **self._pinning(options),
        )

    def eval_loader(
        self, dataset: Dataset[Any], batch_size: int, *, to_device: bool = True, **options: Any
    ) -> EvalLoader:
        """The evaluation samples of this rank: each sample once over all ranks, in order, without padding.

        This rank has samples rank, rank + world_size, and so on. All ranks iterate over it at the same time, because
        the run can stop between its batches.

        Args:
            dataset: with ``__len__`` and ``__getitem__``.
            batch_size: samples per rank and batch. The last batch may be smaller.
            to_device: on a GPU, yields batches on this rank's device, as ``loader`` does.
            options: of torch's DataLoader, as for ``loader``.

        Raises TypeError and ValueError as ``loader`` does.
        """
        check_switches(to_device=to_device)
        return EvalLoader(
            dataset,
            batch_size,
            rank=self.rank,
            world_size=self.world_size,
            at_batch=self._stop_in_evaluation,
            around=self._evaluating,
            device=self.device if to_device else None,
            **self._pinning(options),
        )

    def _pinning(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options, with pinned memory on a GPU unless they set it.

        With workers, a thread of torch pins their batches. It refuses tensors on a device, which a dataset can return
        if there are no workers.
        """
        if self.device.type != "cuda" or "pin_memory" in options:
            return dict(options)
        return {**options, "pin_memory" if options.get("num_workers") else "pins_here": True}
