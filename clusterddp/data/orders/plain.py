"""The dataset's samples, each once per epoch: shuffled, or in sequence."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from clusterddp.data import randomness
from clusterddp.data.orders.order import Binding, BoundOrder, Columns, EpochOrder, Order
from clusterddp.data.orders.permutation import Permutation

_RANDPERM = "shuffled-1"
#: Samples that are drawn in one call.
_AT_ONCE = 4096
Indices = npt.NDArray[np.int64]


class Shuffled(Order):
    """Each epoch in its own random order. Without a version, the newest for a new run, and else the run's own."""

    unlabelled = _RANDPERM

    def __init__(self, version: int | None = None) -> None:
        if version not in (None, 1, 2):
            raise ValueError(f"shuffled(version={version!r}): expected 1 or 2")
        self._version = version

    def bind(self, to: Binding, label: str | None = None) -> BoundOrder:
        version = self._version or (1 if label == _RANDPERM else 2)
        return _Randperm(to) if version == 1 else _Permuted(to)


class Sequential(Order):
    """The dataset's own order in each epoch."""

    unlabelled = "sequential"

    def bind(self, to: Binding, label: str | None = None) -> BoundOrder:  # noqa: ARG002
        return _InSequence("sequential", to.of_epoch(to.length))


class _InSequence(EpochOrder):
    def indices(self, epoch: int, start: int, stop: int) -> list[int]:  # noqa: ARG002
        return list(range(start, stop))


class _Permuted(EpochOrder):
    def __init__(self, to: Binding) -> None:
        super().__init__("shuffled-2", to.of_epoch(to.length))
        self._permutation = lru_cache(2)(lambda epoch: Permutation(to.length, "shuffled", to.seed, epoch))

    def indices(self, epoch: int, start: int, stop: int) -> list[int]:
        found: list[int] = self._permutation(epoch)(np.arange(start, stop)).tolist()
        return found

    def shares(self, start: int, size: int, stride: int) -> Iterator[Columns]:
        """A call of the permutation takes 40 us for few places and 140 for 4096: small shares are drawn together."""
        at_once = max(1, _AT_ONCE // size)
        places = (np.arange(at_once)[:, None] * stride + np.arange(size)).ravel()
        for first in itertools.count(start, at_once * stride):
            epochs, indices = self._drawn(first, places)
            rows = itertools.repeat((epochs,) * size) if isinstance(epochs, int) else epochs.reshape(-1, size).tolist()
            yield from zip(rows, indices.reshape(-1, size).tolist())  # noqa: B905

    def _drawn(self, first: int, places: Indices) -> tuple[Indices | int, Indices]:
        """The indices of samples that are so many places behind position ``first``, and their epochs or epoch."""
        epoch, inside = divmod(first, self.length)
        if inside + int(places[-1]) < self.length:
            return epoch, self._permutation(epoch)(places + inside)
        epochs, found = np.divmod(places + inside, self.length)
        for number in range(int(epochs[0]), int(epochs[-1]) + 1):
            of = slice(*np.searchsorted(epochs, (number, number + 1)))
            found[of] = self._permutation(epoch + number)(found[of])
        return epochs + epoch, found


class _Randperm(EpochOrder):
    """What runs did before orders had labels. It has a list of all samples, which takes seconds for 10^8 of them."""

    def __init__(self, to: Binding) -> None:
        super().__init__(_RANDPERM, to.of_epoch(to.length))
        self._samples, self._seed = to.length, to.seed
        self._epoch, self._indices = -1, torch.empty(0, dtype=torch.int64)

    def indices(self, epoch: int, start: int, stop: int) -> list[int]:
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(randomness.hash32("order", self._seed, epoch))
            self._indices, self._epoch = torch.randperm(self._samples, generator=generator), epoch
        return self._indices[start:stop].tolist()
