"""Shards in a random order, and samples mixed within a window that moves over them: reads nearly in sequence.

In each epoch the shards are laid end to end in another order. That row of samples is cut into windows, at places that
differ from epoch to epoch, and the samples are shuffled within each window.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from clusterddp.data.orders.order import ArrayOrder, Binding, BoundOrder, Order
from clusterddp.data.orders.permutation import Permutation, keys
from clusterddp.data.orders.values import count_of, short_hash

Indices = npt.NDArray[np.int64]


class ByShard(Order):
    """``window``: in samples."""

    def __init__(self, window: int) -> None:
        self._window = count_of(window, "window", "a number of samples")

    def bind(self, to: Binding, label: str | None = None) -> BoundOrder:  # noqa: ARG002
        lengths = getattr(to.dataset, "shard_lengths", None)
        if lengths is None:
            raise TypeError(
                f"orders.by_shard() needs a dataset with shards, such as those of clusterddp.streams; got "
                f"{type(to.dataset).__name__}, which has no shard_lengths"
            )
        lengths = np.asarray(lengths, dtype=np.int64)
        if lengths.sum() != to.length:
            raise ValueError(f"shard_lengths has {lengths.sum()} samples, and the dataset {to.length}")
        return _Windows(lengths, self._window, to)


class _Epoch:
    """Where the samples of an epoch are."""

    def __init__(self, lengths: Indices, starts: Indices, window: int, seed: int, number: int) -> None:
        order = Permutation(lengths.size, "by_shard", seed, number)(np.arange(lengths.size))
        self._ends = np.cumsum(lengths[order])
        #: What is added to a place in the row to have the sample's index.
        self._moves = starts[order] - (self._ends - lengths[order])
        self._window, self._key = window, (seed, number)
        self._shift = int(keys("by_shard shift", seed, number)[0]) % window
        self._mixing = lru_cache(64)(self._mixing_of)

    def at(self, places: Indices) -> Indices:
        """The samples at these places of the epoch."""
        windows = (places + self._shift) // self._window
        for window in np.unique(windows).tolist():
            inside = windows == window
            first, mixing = self._mixing(window)
            places[inside] = mixing(places[inside] - first) + first
        found: Indices = places + self._moves[np.searchsorted(self._ends, places, side="right")]
        return found

    def _mixing_of(self, window: int) -> tuple[int, Permutation]:
        """A window's first place, and the permutation of its places."""
        first = max(0, window * self._window - self._shift)
        stop = min(int(self._ends[-1]), (window + 1) * self._window - self._shift)
        return first, Permutation(stop - first, "by_shard window", *self._key, window)


class _Windows(ArrayOrder):
    def __init__(self, lengths: Indices, window: int, to: Binding) -> None:
        label = f"by_shard-1 (window {window}, {lengths.size} shards {short_hash(lengths)})"
        super().__init__(label, to.of_epoch(to.length))
        starts = np.cumsum(lengths) - lengths
        self._epoch = lru_cache(2)(lambda number: _Epoch(lengths, starts, window, to.seed, number))

    def at(self, epoch: int, places: Indices) -> Indices:
        return self._epoch(epoch).at(places)
