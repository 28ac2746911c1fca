"""Which order ``ctx.loader`` uses, from its arguments, which have the names of torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from clusterddp.data.orders.order import Order
from clusterddp.data.orders.plain import Sequential, Shuffled
from clusterddp.data.orders.samplers import Sampled
from clusterddp.data.orders.weighted import Weighted


def chosen(
    dataset: Any,
    batch_size: int,
    *,
    shuffle: bool | None = None,
    order: Order | None = None,
    sampler: Iterable[Any] | None = None,
    batch_sampler: Iterable[Any] | None = None,
) -> Order:
    """The order that the arguments of ``ctx.loader`` ask for.

    Raises TypeError where they ask for two, for samplers that divide the samples among the ranks, and for several
    datasets without a mixture.
    """
    given = {"shuffle": shuffle, "order": order, "sampler": sampler, "batch_sampler": batch_sampler}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise TypeError(f"{' and '.join(names)} each say how the samples are ordered: give ctx.loader() one of them")
    if order is not None:
        if not isinstance(order, Order):
            raise TypeError(f"order is {order!r}: expected one of clusterddp.orders, such as orders.weighted(weights)")
        return order
    if sampler is not None:
        return _of_sampler(sampler, dataset)
    if batch_sampler is not None:
        return _of_batch_sampler(batch_sampler, batch_size, dataset)
    if isinstance(dataset, Mapping) and dataset and 0 not in dataset:
        listed = ", ".join(map(repr, islice(dataset, 3))) + ", ..." * (len(dataset) > 3)
        raise TypeError(
            f"the dataset is a dict with {listed}: pass one of its datasets, or order=orders.mixture(weights) for all"
        )
    return Sequential() if shuffle is False else Shuffled()


def _of_sampler(sampler: Any, dataset: Any) -> Order:
    """One of ours that does the same as torch's and needs no list of the samples, or the sampler itself."""
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
        raise ValueError(f"batch_size is {batch_size}, and that of batch_sampler is {sampler.batch_size}")
    return _of_sampler(sampler.sampler, dataset)


def _refuse_shares(sampler: Any) -> None:
    """Raises TypeError for a sampler, or one within a batch sampler, that gives each rank its part."""
    for part in (sampler, getattr(sampler, "sampler", None)):
        numbers = [getattr(part, name, None) for name in ("num_replicas", "world_size")]
        divides = any(isinstance(number, int) and number > 1 for number in numbers)
        if divides or isinstance(part, DistributedSampler):
            raise TypeError(
                f"{type(part).__name__} gives each rank its part of the samples, and ctx.loader() does that itself: "
                "leave it out, with shuffle=False if it did not shuffle, or give ctx.loader() a sampler of all samples"
            )
