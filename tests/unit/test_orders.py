"""The orders of samples: which sample is at which position, how often, and how random."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from clusterddp.data import randomness
from clusterddp.data.orders.order import Binding, BoundOrder
from clusterddp.data.orders.permutation import Permutation
from clusterddp.data.orders.plain import Sequential, Shuffled


def bound(
    order: Shuffled | Sequential, length: int, batch: int = 4, seed: int = 1, drop_last: bool = False
) -> BoundOrder:
    return order.bind(Binding(None, length, seed, batch, drop_last))


def test_every_epoch_has_each_sample_once_in_its_own_order() -> None:
    order = bound(Shuffled(), 10)
    epochs = [order.samples(10 * epoch, 10 * epoch + 10) for epoch in range(3)]
    for number, epoch in enumerate(epochs):
        assert {sample[0] for sample in epoch} == {number}
        assert sorted(sample[1] for sample in epoch) == list(range(10))
    assert epochs[0] != epochs[1] and bound(Shuffled(), 10, seed=2).samples(0, 10) != epochs[0]


@pytest.mark.parametrize("length", [1, 2, 3, 10, 4096, 4097, 5000, 65536, 100_003])
def test_a_permutation_has_each_place_once(length: int) -> None:
    images = Permutation(length, "key")(np.arange(length))
    assert (np.sort(images) == np.arange(length)).all()


def test_the_order_of_a_run_never_changes() -> None:
    """These numbers are in no library's hands: a run resumes by them with any version of numpy or torch."""
    assert [index for _, index in bound(Shuffled(), 10).samples(0, 10)] == [2, 4, 3, 8, 6, 5, 7, 0, 9, 1]
    assert [index for _, index in bound(Shuffled(), 10**9).samples(10**18, 10**18 + 3)] == [
        930974982,
        460560215,
        858593011,
    ]


def test_a_run_that_started_with_randperm_keeps_it() -> None:
    order = Shuffled().bind(Binding(None, 10, 1, 4), "shuffled-1")
    generator = torch.Generator().manual_seed(randomness.hash32("order", 1, 3))
    assert order.samples(30, 40) == [(3, i) for i in torch.randperm(10, generator=generator).tolist()]


def deviation(counts: npt.NDArray[Any], expected: npt.NDArray[Any], freedom: int) -> float:
    """Chi-squared, in standard deviations from what truly random counts have on average."""
    chi = ((counts - expected) ** 2 / expected).sum()
    return float((chi - freedom) / np.sqrt(2 * freedom))


@pytest.mark.parametrize("length", [5, 64, 4097, 10_000])
def test_shuffled_brings_each_sample_to_each_place_equally_often(length: int) -> None:
    """In 16 classes of samples and of places."""
    epochs, classes = 400_000 // length, min(length, 16)
    cell = np.arange(length) * classes // length
    counts = np.zeros((classes, classes))
    for epoch in range(epochs):
        images = cell[Permutation(length, "key", epoch)(np.arange(length))]
        counts += np.bincount(cell * classes + images, minlength=classes**2).reshape(counts.shape)
    sizes = np.bincount(cell)
    assert abs(deviation(counts, np.outer(sizes, sizes) * epochs / length, (classes - 1) ** 2)) < 5


@pytest.mark.parametrize("length", [64, 4097, 10_000])
def test_shuffled_separates_neighbours(length: int) -> None:
    """The distance of two neighbours' places, modulo the length, is uniform: no trace of the order before."""
    epochs, classes = 400_000 // length, 16
    counts = np.zeros(classes)
    for epoch in range(epochs):
        images = Permutation(length, "key", epoch)(np.arange(length))
        counts += np.bincount(((np.diff(images) % length - 1) * classes // (length - 1)), minlength=classes)
    sizes = np.bincount(np.arange(length - 1) * classes // (length - 1))
    expected = sizes * (counts.sum() / (length - 1))
    assert abs(deviation(counts, expected, classes - 1)) < 5
