"""What holds of every order, for any dataset, batch, number of ranks and point of a stop."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, SubsetRandomSampler

from clusterddp import orders
from clusterddp.data import sample_order
from clusterddp.data.loader import Loader
from clusterddp.data.sample_order import Order
from clusterddp.data.samplers import chosen


class Numbers(Dataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, int(torch.randint(2**31, ()))


class Rotated:
    """A user's sampler: all samples, in epoch e from sample e on."""

    def __init__(self, length: int) -> None:
        self._length, self._epoch = length, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Any:
        return (int(np.int64(index + self._epoch) % self._length) for index in range(self._length))


class Batches:
    """A user's batch sampler: whole batches of all samples in a random order."""

    def __init__(self, length: int, batch_size: int) -> None:
        self._length, self._batch_size = length, batch_size

    def __iter__(self) -> Any:
        mixed = torch.randperm(self._length)
        for start in range(0, self._length - self._batch_size + 1, self._batch_size):
            yield mixed[start : start + self._batch_size]


@dataclass
class Case:
    """One run: its loaders are made of these, for any number of ranks that divides ``global_batch``."""

    kind: str
    length: int
    batch: int
    """Of a rank in the run's first attempt, with ``ranks`` ranks."""
    ranks: int
    seed: int
    drop_last: bool

    def order(self, batch: int) -> tuple[Any, Order]:
        """The dataset and its order, made by each process of the run; ``batch``: of a rank."""
        n, data = self.length, Numbers(self.length)
        make: dict[str, Callable[[], tuple[Any, Order]]] = {
            "shuffled": lambda: (data, orders.shuffled()),
            "sequential": lambda: (data, orders.sequential()),
            "weighted": lambda: (data, orders.weighted(np.arange(1, n + 1))),
            "sampler": lambda: (data, chosen(data, batch, sampler=Rotated(n))),
            "subset": lambda: (data, chosen(data, batch, sampler=SubsetRandomSampler(range(n)))),
            "batches": lambda: (data, chosen(data, batch, batch_sampler=Batches(n, batch))),
        }
        return make[self.kind]()

    def loader(self, rank: int = 0, ranks: int = 1, **options: Any) -> Loader:
        """Of a rank of the run's first attempt, or of another number of ranks."""
        dataset, sample_order = self.order(self.batch)
        size: dict[str, Any] = {"seed": self.seed, "rank": rank, "world_size": ranks, "drop_last": self.drop_last}
        return Loader(dataset, self.batch, order=sample_order, **size, **options)

    def steps(self, first: int, count: int, ranks: int, checkpoint: Any = None, **options: Any) -> list[list[Any]]:
        """The samples of each global step, over all ranks; resumed from a checkpoint, if there is one."""
        loaders = [self.loader(rank, ranks, **options) for rank in range(ranks)]
        for loader in loaders if checkpoint else []:
            loader.restore(checkpoint)
        return [
            [sample for loader in loaders for sample in zip(*next(loader._shares(step)), strict=True)]
            for step in range(first, first + count)
        ]


KINDS = [
    "shuffled",
    "sequential",
    "weighted",
    "sampler",
    "subset",
    "batches",
]


@st.composite
def cases(draw: st.DrawFn, kinds: list[str] = KINDS) -> Case:
    batch, ranks = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    drop_last = draw(st.booleans())
    length = draw(st.integers(batch * ranks if drop_last else batch, 60))
    return Case(draw(st.sampled_from(kinds)), length, batch, ranks, draw(st.integers(0, 3)), drop_last)


@settings(deadline=None, max_examples=200)
@given(cases(), st.integers(0, 30), st.data())
def test_any_resume_has_the_samples_of_the_uninterrupted_run(case: Case, stop: int, data: st.DataObject) -> None:
    """Stopped anywhere, on any number of ranks before and after, and with another ``batch_size`` after."""
    whole = case.steps(0, stop + 6, case.ranks)
    checkpoint = case.loader(0, case.ranks).progress(stop)
    divisors = [ranks for ranks in range(1, 21) if checkpoint["global_batch"] % ranks == 0]
    ranks = data.draw(st.sampled_from(divisors))
    assert case.steps(stop, 6, ranks, checkpoint) == whole[stop:]


@settings(deadline=None, max_examples=200)
@given(cases([kind for kind in KINDS if kind != "weighted"]))
def test_each_epoch_has_each_sample_once(case: Case) -> None:
    """With ``drop_last``, and in whole batches of a batch sampler, each at most once."""
    loader = case.loader(0, case.ranks)
    steps = loader.steps_in(3)
    samples = [sample for step in case.steps(0, steps, case.ranks) for sample in step]
    count = loader.steps_in(1) * loader.global_batch if case.drop_last else case.length
    if case.kind == "batches" and not case.drop_last:
        count = case.length // case.batch * case.batch
    for epoch in range(3):
        indices = Counter(sample[1] for sample in samples if sample[0] == epoch)
        assert indices.total() == count and set(indices.values()) == {1}
        assert indices.keys() <= set(range(case.length))


@settings(deadline=None, max_examples=100)
@given(cases(), st.integers(0, 30))
def test_epochs_are_counted_as_the_samples_say(case: Case, step: int) -> None:
    """``run.epoch``, ``run.end_of_epoch``, ``len(loader)``."""
    loader = case.loader(0, case.ranks)
    now, after = case.steps(step, 2, case.ranks)
    assert loader.epoch(step) == now[0][0]
    assert loader.ends_epoch(step) == (after[0][0] > now[0][0])
    assert len(loader) == loader.steps_in(1)


@settings(deadline=None, max_examples=100)
@given(cases(), st.integers(0, 30), st.sampled_from([1, 7, sample_order.AT_ONCE]))
def test_steps_that_are_drawn_together_have_the_same_samples(case: Case, first: int, at_once: int) -> None:
    """``at_once``: how many samples may be drawn in one call."""
    with mock.patch.object(sample_order, "AT_ONCE", at_once):
        loader = case.loader(case.ranks - 1, case.ranks)
        drawn = list(itertools.islice(loader._shares(first), 20))
    for step, batch in enumerate(drawn, first):
        start = step * loader.global_batch + (case.ranks - 1) * loader.share
        assert list(zip(*batch, strict=True)) == loader._order.samples(start, start + loader.share)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("kind", ["shuffled", "weighted", "batches"])
def test_the_number_of_workers_changes_nothing(kind: str, workers: int) -> None:
    """Neither the samples nor their randomness, before and after a stop."""
    case = Case(kind, 23, 4, 1, 1, False)

    def taken(first: int, count: int, **options: Any) -> list[Any]:
        batches = case.loader(**options).batches(first)
        found = [[column.tolist() for column in batch] for batch in itertools.islice(batches, count)]
        batches.close()  # type: ignore[attr-defined]
        return found

    plain = taken(0, 12)
    assert taken(5, 7, num_workers=workers) == plain[5:]


def test_a_sample_that_is_drawn_twice_in_an_epoch_is_augmented_in_two_ways() -> None:
    """Its seed has the number of the draw, too."""
    loader = Loader(Numbers(2), 8, order=orders.weighted([1, 0]), seed=0, rank=0, world_size=1)
    indices, drawn = next(loader.batches(0))
    assert set(indices.tolist()) == {0} and len(set(drawn.tolist())) == 8
