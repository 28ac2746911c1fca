"""Samplers of torch and of the user in ``ctx.loader``: which are accepted, what they become, and why others are not."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from clusterddp.data.loader import Loader
from clusterddp.data.samplers import chosen
from tests.wording import raises

DATA = TensorDataset(torch.arange(12))


def loader(batch_size: int = 4, world_size: int = 1, **order: Any) -> Loader:
    made = chosen(DATA, batch_size, **order)
    return Loader(DATA, batch_size, order=made, seed=1, rank=0, world_size=world_size)


def indices(source: Loader, start: int, stop: int) -> list[Any]:
    return [sample[1] for sample in source._order.samples(start, stop)]


class Drawn(Sampler[int]):
    """Draws from a generator, which decides whether it is a pure function of the epoch."""

    def __init__(self, numbers: Any) -> None:
        self._numbers = numbers

    def __iter__(self) -> Iterator[int]:
        return iter([int(self._numbers() * 12) for _ in range(12)])


class Counting(Sampler[int]):
    """Starts at another sample each time that it is iterated over, unless it is told the epoch."""

    def __init__(self) -> None:
        self._times = 0

    def __iter__(self) -> Iterator[int]:
        self._times += 1
        return iter([(index + self._times) % 12 for index in range(12)])


class Told(Counting):
    def set_epoch(self, epoch: int) -> None:
        self._times = epoch


class Some(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([index for index in range(1200) if random.random() < 0.5])


@pytest.mark.parametrize(
    ("sampler", "label"),
    [
        (SequentialSampler(DATA), "sequential"),
        (RandomSampler(DATA), "shuffled-2"),
        (WeightedRandomSampler([1.0] * 12, 30), "weighted-1 (30 per epoch, weights"),
        (WeightedRandomSampler([1.0] * 12, 5, replacement=False), "WeightedRandomSampler (5 per epoch, hash"),
        (RandomSampler(DATA, num_samples=7), "RandomSampler (7 per epoch, hash"),
        (RandomSampler(DATA, replacement=True), "RandomSampler (12 per epoch, hash"),
        (RandomSampler(range(5)), "RandomSampler (5 per epoch, hash"),
        (SubsetRandomSampler([1, 3, 5]), "SubsetRandomSampler (3 per epoch, hash"),
        ([4, 2, 4], "list (3 per epoch, hash"),
    ],
)
def test_samplers_of_torch_become_an_order_that_does_the_same(sampler: Any, label: str) -> None:
    assert loader(sampler=sampler).progress(0)["order"].startswith(label)


def test_a_batch_sampler_of_torch_is_its_sampler() -> None:
    """Where it drops its last batch, it is drawn itself."""
    assert loader(batch_sampler=BatchSampler(RandomSampler(DATA), 4, False)).progress(0)["order"] == "shuffled-2"
    dropping = loader(5, batch_sampler=BatchSampler(SequentialSampler(DATA), 5, True))
    assert indices(dropping, 0, 20) == [*range(10), *range(10)] and len(dropping) == 2


@pytest.mark.parametrize(
    "sampler",
    [
        Drawn(lambda: float(torch.rand(()))),
        Drawn(random.random),
        Drawn(np.random.random),
        Told(),
        RandomSampler(DATA, replacement=True, generator=torch.Generator()),
        BatchSampler(Told(), 3, True),
    ],
)
def test_a_pure_sampler_gives_the_same_samples_from_any_epoch_on(sampler: Any) -> None:
    """It is seeded for each epoch, and the script's own generators do not notice."""
    torch.manual_seed(7)
    before = torch.get_rng_state()
    order = {"batch_sampler": sampler} if isinstance(sampler, BatchSampler) else {"sampler": sampler}
    size = 3 if "batch_sampler" in order else 4
    whole = indices(loader(size, **order), 0, 60)
    assert indices(loader(size, **order), 30, 60) == whole[30:]
    assert whole[:12] != whole[12:24]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "sampler",
    [Counting(), Drawn(np.random.default_rng().random), Drawn(random.Random(0).random), (i for i in range(12))],
)
def test_a_sampler_with_hidden_state_is_refused_with_the_remedy(sampler: Any) -> None:
    with raises(ValueError):
        loader(sampler=sampler)


class OfRank(Told):
    """A user's own division among the ranks."""

    num_replicas, world_size = 2, None


@pytest.mark.parametrize(
    "order",
    [
        {"sampler": DistributedSampler(DATA, 2, 0)},
        {"batch_sampler": BatchSampler(DistributedSampler(DATA, 2, 0), 4, False)},
        {"sampler": OfRank()},
        {"sampler": Some()},
        {"sampler": []},
        {"sampler": itertools.count()},
        {"sampler": 3},
        {"batch_sampler": [[1, 2, 3]]},
        {"batch_sampler": BatchSampler(SequentialSampler(DATA), 3, False)},
        {"sampler": [1], "shuffle": True},
    ],
)
def test_other_samplers_are_refused_with_the_reason(order: Any) -> None:
    with raises((TypeError, ValueError)):
        loader(**order)


class Rotating:
    """No Sampler of torch's: all samples, in epoch e from sample e on."""

    def __init__(self) -> None:
        self.epoch, self.parent = 0, self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(index + self.epoch) % 12 for index in range(12)])

    def __len__(self) -> int:
        return 12


def test_a_sampler_within_a_batch_sampler_is_told_the_epoch_whatever_its_class() -> None:
    source = loader(batch_sampler=BatchSampler(Rotating(), 4, drop_last=True))
    assert [indices(source, 12 * epoch, 12 * epoch + 3) for epoch in (0, 1, 5)] == [[0, 1, 2], [1, 2, 3], [5, 6, 7]]


def test_a_sampler_that_changes_its_length_later_is_refused_then() -> None:
    class Growing(Told):
        def __iter__(self) -> Iterator[int]:
            return iter(range(12 + (self._times > 2)))

    source = loader(sampler=Growing())
    indices(source, 0, 36)
    with raises(ValueError):
        indices(source, 36, 37)


def test_a_step_takes_whole_batches_of_a_batch_sampler() -> None:
    """Two ranks, two batches; the third batch of an epoch shares a step with the first of the next epoch."""
    batches = [[0, 4, 8, 1], [5, 9, 2, 6], [10, 3, 7, 11]]
    source = loader(world_size=2, batch_sampler=batches)
    assert [indices(source, 8 * step, 8 * step + 8) for step in range(2)] == [
        batches[0] + batches[1],
        batches[2] + batches[0],
    ]
    assert len(source) == 2 and source.ends_epoch(1)
