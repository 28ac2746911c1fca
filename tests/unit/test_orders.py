"""The orders of samples: which sample is at which position, how often, and how random."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils.data import TensorDataset

from clusterddp import orders
from clusterddp.data.loader import Loader
from clusterddp.data.sample_order import Binding, BoundOrder, Order, Permutation, Shuffled, Weighted
from clusterddp.data.samplers import chosen
from clusterddp.errors import CheckpointError
from tests.wording import raises


def bound(order: Order, length: int, batch: int = 4, seed: int = 1, drop_last: bool = False) -> BoundOrder:
    return order.bind(Binding(length, seed, batch, drop_last))


@pytest.mark.parametrize("length", [1, 2, 3, 10, 4096, 4097, 5000, 65536, 100_003])
def test_a_permutation_has_each_place_once(length: int) -> None:
    images = Permutation(length, "key")(np.arange(length))
    assert (np.sort(images) == np.arange(length)).all()


def test_the_order_of_a_run_never_changes() -> None:
    """These numbers are in no library's hands: a run resumes by them with any version of numpy or torch."""
    assert [index for _, index in bound(Shuffled(), 10).samples(0, 10)] == [2, 4, 3, 8, 6, 5, 7, 0, 9, 1]
    assert [index for _, index in bound(Shuffled(), 10**9).samples(10**18, 10**18 + 3)] == [
        894541941,
        529347960,
        826923720,
    ]


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


def indices_of(order: BoundOrder, start: int, stop: int) -> list[int]:
    return [sample[1] for sample in order.samples(start, stop)]


@pytest.mark.parametrize("blocks", [1 << 22, 64])
def test_weighted_draws_in_proportion_to_the_weights(blocks: int) -> None:
    """By a chi-squared test; a sample of weight 0 never."""
    weights = np.arange(1001) % 7
    counts = np.bincount(
        indices_of(bound(Weighted(weights, None, None, blocks), 1001), 10**12, 10**12 + 300_000), minlength=1001
    )
    assert not counts[weights == 0].any()
    expected = (weights / weights.sum() * 300_000)[weights > 0]
    assert abs(deviation(counts[weights > 0], expected, expected.size - 1)) < 5


def test_weighted_draws_are_independent_of_the_one_before() -> None:
    draws = np.array(indices_of(bound(orders.weighted([1, 2, 3]), 3), 0, 300_000))
    counts = np.bincount(draws[:-1] * 3 + draws[1:], minlength=9)
    shares = np.array([1, 2, 3]) / 6
    assert abs(deviation(counts, np.outer(shares, shares).ravel() * 299_999, 4)) < 5


def test_sums_over_blocks_find_the_same_samples() -> None:
    """As where there are too many weights for a sum each."""
    count = (1 << 20) + 1000  # they are read in chunks of 2^20
    weights = np.random.default_rng(0).random(count) * (np.arange(count) % 3 > 0)
    weights[-40:] = 0
    whole = indices_of(bound(orders.weighted(weights), count), 0, 10_000)
    assert indices_of(bound(Weighted(weights, None, None, 1 << 16), count), 0, 10_000) == whole


def test_weights_of_classes_are_those_of_their_samples(tmp_path: Path) -> None:
    """Whatever holds the labels: a list, a tensor, a file on disk."""
    labels = [0, 1, 1, 1, 3, 3]
    per_class = orders.class_weights(torch.tensor(labels))
    assert per_class.tolist() == [2, 2 / 3, 0, 1]
    np.save(tmp_path / "labels.npy", np.array(labels, dtype=np.uint8))
    held = [labels, torch.tensor(labels), np.load(tmp_path / "labels.npy", mmap_mode="r")]
    drawn = [indices_of(bound(orders.weighted(per_class, of), 6), 0, 1000) for of in held]
    drawn.append(indices_of(bound(orders.weighted(per_class[labels]), 6), 0, 1000))
    assert all(draws == drawn[0] for draws in drawn)
    assert orders.class_weights([True, False, False, False]).tolist() == [4 / 6, 2]


def test_an_order_of_a_thousand_million_samples_needs_no_list_of_them() -> None:
    """A list would not fit into the memory that the test may take; each is asked for the samples at step 10^9."""
    with most_memory(100 << 20):
        for order in (orders.shuffled(), orders.sequential()):
            assert len(bound(order, 10**9).samples(64 * 10**9, 64 * 10**9 + 64)) == 64
    with most_memory(50 << 20):  # with as few sums as for 128 times as many
        draws = bound(Weighted([1], np.broadcast_to(np.uint8(0), 8_000_000), None, 1 << 16), 8_000_000)
        assert len(draws.samples(64 * 10**9, 64 * 10**9 + 64)) == 64


@contextmanager
def most_memory(limit: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


_FLOAT: Any = 1.5


@pytest.mark.parametrize(
    "make",
    [
        lambda: orders.weighted([1, -1]),
        lambda: orders.weighted([1, float("nan")]),
        lambda: orders.weighted([0, 0]),
        lambda: orders.weighted([1]),
        lambda: orders.weighted([1, 1], [0, 2]),
        lambda: orders.weighted(["a", "b"]),
        lambda: orders.weighted([1, 1], [0.0, 1.0]),
        lambda: orders.weighted([1, 1], num_samples=0),
        lambda: orders.weighted([1, 1], num_samples=_FLOAT),
        lambda: orders.weighted([1e308, 1e308]),
    ],
)
def test_what_fits_no_dataset_is_refused(make: Callable[[], Order]) -> None:
    with raises((TypeError, ValueError)):
        Loader(TensorDataset(torch.zeros(2)), 1, order=make(), seed=0, rank=0, world_size=1)


def test_a_number_of_samples_from_numpy_can_be_recorded_in_a_checkpoint() -> None:
    order = orders.weighted([1, 1], num_samples=np.int64(8))
    source = Loader(TensorDataset(torch.zeros(2)), 1, order=order, seed=0, rank=0, world_size=1)
    assert json.loads(json.dumps(source.progress(9)))["epoch"] == 1


def test_a_dict_of_datasets_is_refused_and_a_dict_of_samples_is_not() -> None:
    with raises(TypeError):
        chosen({"a": [1], "b": [1]}, 1)
    assert isinstance(chosen({0: 1.0, 1: 2.0}, 1), Shuffled)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (orders.weighted([1, 2]), orders.weighted([1, 3])),
        (orders.weighted([1, 2]), orders.weighted([1, 2], num_samples=3)),
        (orders.weighted([1, 2]), orders.shuffled()),
    ],
)
def test_a_resume_with_another_order_is_refused_and_names_both(one: Order, other: Order) -> None:
    def loader(order: Order) -> Loader:
        return Loader(TensorDataset(torch.zeros(2)), 1, order=order, seed=0, rank=0, world_size=1)

    labels = [loader(order).progress(0)["order"] for order in (one, other)]
    with raises(CheckpointError) as refused:
        loader(other).restore(loader(one).progress(5))
    assert [repr(label) in str(refused.value) for label in labels] == [True, True]
    loader(one).restore(loader(one).progress(5))
