"""Samples drawn with replacement, each with a probability in proportion to its weight.

Draw p of the endless stream is a function of (seed, p) alone: a random point below the sum of all weights, and the
sample whose weight covers it. The weights are summed over blocks; a draw finds its block by bisection and its sample
within the block, so that 10^9 weights need 8 million sums.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from clusterddp.data.orders.order import ArrayOrder, Binding, BoundOrder, Order
from clusterddp.data.orders.permutation import keys, mixed
from clusterddp.data.orders.values import Array, array_of, check_length, optional_count, short_hash

#: The most blocks; below, a block is one sample.
_BLOCKS = 1 << 23
#: Weights that are read at once when they are summed.
_CHUNK = 1 << 20
_GOLDEN, _11 = np.uint64(0x9E3779B97F4A7C15), np.uint64(11)

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


class Weighted(Order):
    """``weights``: per sample or, with ``labels``, per class."""

    def __init__(self, weights: Any, labels: Any, num_samples: int | None) -> None:
        self._weights = array_of(weights, "weights")
        self._labels = None if labels is None else _labels(labels)
        if self._labels is not None:
            _check_labels(self._labels, self._weights.size)
        self._num_samples = optional_count(num_samples, "num_samples", "the number of draws per epoch")
        self._table: _Table | None = None

    def bind(self, to: Binding, label: str | None = None) -> BoundOrder:
        per_sample = self._weights if self._labels is None else self._labels
        check_length(per_sample, to.length, "weights" if self._labels is None else "labels")
        if self._table is None:
            self._table = _Table(self._weights, self._labels)
        samples = self._num_samples or to.length
        label = f"weighted-1 ({samples} per epoch, weights {self._table.hash})"
        return _Draws(label, to.of_epoch(samples), self._table, to.seed)


class _Draws(ArrayOrder):
    repeats = True

    def __init__(self, label: str, length: int, table: _Table, seed: int) -> None:
        super().__init__(label, length)
        self._table, self._key = table, keys("weighted", seed)[0]

    def at(self, epoch: int, places: Indices) -> Indices:
        draws = (places + epoch * self.length).astype(np.uint64)
        points = (mixed(draws * _GOLDEN + self._key) >> _11) * 2.0**-53
        return self._table.find(points)


class _Table:
    """Finds the sample that covers a point of the weights laid end to end."""

    def __init__(self, weights: Array, labels: Array | None) -> None:
        self._classes = None if labels is None else weights
        of = weights if labels is None else labels
        self._block = 1 << max(0, (-(-of.size // _BLOCKS) - 1).bit_length())
        whole = of.size // self._block * self._block
        self._blocks, self._rest = of[:whole].reshape(-1, self._block), of[whole:]
        sums, checksums = [], []
        for start in range(0, of.size, _CHUNK):
            values = self._weights(of[start : start + _CHUNK])
            _check_weights(values, start)
            checksums.append(zlib.crc32(values.data))  # ten times as fast as a hash
            padded = np.zeros(-(-values.size // self._block) * self._block)
            padded[: values.size] = values
            sums.append(np.cumsum(padded.reshape(-1, self._block), axis=1)[:, -1].copy())
        with np.errstate(over="ignore"):
            self._ends = np.cumsum(np.concatenate(sums))
        self.hash = short_hash(*checksums)
        if not self._ends[-1] > 0:
            raise ValueError("weights: all are 0")
        if not np.isfinite(self._ends[-1]):
            raise ValueError("weights: their sum is too large for a float; divide all of them by the largest")

    def _weights(self, of: Array) -> Floats:
        """Of what is stored per sample: the weights themselves, or labels."""
        return np.ascontiguousarray(of if self._classes is None else self._classes[of], dtype=np.float64)

    def find(self, fractions: Floats) -> Indices:
        """The samples at fractions of the sum of all weights, 0 <= fraction < 1. None has weight 0."""
        ends = self._ends
        points = np.minimum(fractions * ends[-1], np.nextafter(ends[-1], 0))
        blocks: Indices = np.searchsorted(ends, points, side="right")
        if self._block == 1:
            return blocks
        sums = np.cumsum(self._in_blocks(blocks), axis=1)
        rest = points - np.where(blocks > 0, ends[blocks - 1], 0)
        rest = np.minimum(rest, np.nextafter(sums[:, -1], 0))  # rounding
        found: Indices = blocks * self._block + (sums <= rest[:, None]).sum(axis=1)
        return found

    def _in_blocks(self, blocks: Indices) -> Floats:
        """The weights of all samples in each block; 0 beyond the last sample."""
        found = np.zeros((blocks.size, self._block))
        whole = blocks < len(self._blocks)
        found[whole] = self._weights(self._blocks[blocks[whole]])
        found[~whole, : self._rest.size] = self._weights(self._rest)
        return found


def _check_weights(values: Floats, start: int) -> None:
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if wrong.size:
        raise ValueError(f"weights: that of sample {start + wrong[0]} is {values[wrong[0]]}: expected 0 or more")


def _labels(values: Any) -> Array:
    """Booleans as numbers: numpy would take them for a mask."""
    found = array_of(values, "labels")
    return found.view(np.uint8) if found.dtype.kind == "b" else found


def _check_labels(labels: Array, classes: int) -> None:
    if labels.dtype.kind not in "iu":
        raise TypeError(f"labels: expected the number of each sample's class, got {labels.dtype}")
    if labels.size and (labels.min() < 0 or labels.max() >= classes):
        raise ValueError(
            f"labels: they are {labels.min()} to {labels.max()}, and there are weights for classes 0 to {classes - 1}"
        )


def class_weights(labels: Any) -> Floats:
    """See ``clusterddp.orders.class_weights``."""
    values = _labels(labels)
    classes = int(values.max(initial=0)) + 1
    _check_labels(values, classes)
    counts = np.zeros(classes, dtype=np.int64)
    for start in range(0, values.size, _CHUNK):  # bincount makes a copy, eight times as large as that of bytes
        counts += np.bincount(values[start : start + _CHUNK].astype(np.int64), minlength=classes)
    return np.divide(values.size, counts * np.count_nonzero(counts), out=np.zeros(counts.size), where=counts > 0)
