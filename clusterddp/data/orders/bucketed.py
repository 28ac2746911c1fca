"""Batches of samples of similar length, each sample once per epoch.

The samples are sorted by length once. In each epoch they are mixed within buckets, stretches of that sorted list whose
bounds move from epoch to epoch, and the list is then cut into global batches, which come in a random order. An epoch
need not begin or end with a step: its first samples fill the last step of the epoch before. They are taken from the
same place of the sorted list as that epoch's last ones, a random one, so that this step has similar lengths, too.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from clusterddp.data.orders.order import ArrayOrder, Binding, BoundOrder, Order
from clusterddp.data.orders.permutation import Permutation, keys, mixed
from clusterddp.data.orders.values import array_of, check_length, count_of, short_hash

#: The fewest global batches of a bucket, if there are as many.
_BATCHES = 4

Indices = npt.NDArray[np.int64]


class Bucketed(Order):
    """``lengths``: of each sample; ``buckets``: how many there are at most."""

    def __init__(self, lengths: Any, buckets: int) -> None:
        values = array_of(lengths, "lengths")
        buckets = count_of(buckets, "buckets", "the number of buckets")
        if np.isnan(values).any():
            raise ValueError(f"lengths: that of sample {np.flatnonzero(np.isnan(values))[0]} is nan")
        # Samples of equal length are in a random order: else neighbours in the dataset would share a bucket.
        self._sorted = np.lexsort((mixed(np.arange(values.size, dtype=np.uint64)), values))
        self._buckets = buckets
        self._label = f"bucketed-1 ({buckets} buckets, lengths {short_hash(self._sorted)})"

    def bind(self, to: Binding, label: str | None = None) -> BoundOrder:  # noqa: ARG002
        check_length(self._sorted, to.length, "lengths")
        return _Buckets(self._label, self._sorted, self._buckets, to)


class _Epoch:
    """Where an epoch's batches are in the sorted list."""

    def __init__(self, samples: int, width: int, number: int, to: Binding) -> None:
        self._samples, self._width, self._batch, self._key = samples, width, to.global_batch, (to.seed, number)
        #: Samples that belong to the last step of the epoch before, whole batches, and samples of the next such step.
        self._head = min(-number * to.of_epoch(samples) % self._batch, samples)
        self._whole, self._tail = divmod(samples - self._head, self._batch)
        self._head_at, self._tail_at = (_edge(to.seed, edge, self._whole) for edge in (number, number + 1))
        self._shift = int(keys("bucketed shift", to.seed, number)[0]) % width
        self._order = Permutation(self._whole, "bucketed batches", to.seed, number)
        self._mixing = lru_cache(64)(self._mixing_of)

    def at(self, offsets: Indices) -> Indices:
        """Places in the sorted list of the epoch's samples at these offsets."""
        return self._mixed(self._places(offsets))

    def _places(self, offsets: Indices) -> Indices:
        """Before samples are mixed within their buckets."""
        head, tail, batch = self._head, self._tail, self._batch
        number, inside = np.divmod(offsets - head, batch)
        found = self._head_at * batch + (tail if self._tail_at < self._head_at else 0) + offsets
        last = number >= self._whole
        found[last] = self._tail_at * batch + (head if self._head_at <= self._tail_at else 0) + inside[last]
        whole = (offsets >= head) & ~last
        numbers = self._order(number[whole])
        before = head * (numbers >= self._head_at) + tail * (numbers >= self._tail_at)
        found[whole] = numbers * batch + before + inside[whole]
        return found

    def _mixed(self, places: Indices) -> Indices:
        buckets = (places + self._shift) // self._width
        for bucket in np.unique(buckets):
            inside = buckets == bucket
            first, mixing = self._mixing(int(bucket))
            places[inside] = mixing(places[inside] - first) + first
        return places

    def _mixing_of(self, bucket: int) -> tuple[int, Permutation]:
        """A bucket's first place, and the permutation of its places."""
        first = max(0, bucket * self._width - self._shift)
        stop = min(self._samples, (bucket + 1) * self._width - self._shift)
        return first, Permutation(stop - first, "bucketed", *self._key, bucket)


class _Buckets(ArrayOrder):
    def __init__(self, label: str, in_order: Indices, buckets: int, to: Binding) -> None:
        super().__init__(label, to.of_epoch(to.length))
        self._sorted = in_order
        width = -(-to.length // max(1, min(buckets, to.length // (_BATCHES * to.global_batch))))
        self._epoch = lru_cache(2)(lambda number: _Epoch(to.length, width, number, to))

    def at(self, epoch: int, places: Indices) -> Indices:
        found: Indices = self._sorted[self._epoch(epoch).at(places)]
        return found


def _edge(seed: int, number: int, whole: int) -> int:
    """Before which of an epoch's whole batches the step is that it shares with a neighbour."""
    return int(keys("bucketed edge", seed, number)[0]) * (whole + 1) >> 64
