"""The dataset's samples, each once per epoch: shuffled, or in sequence."""

from __future__ import annotations

from functools import lru_cache

import torch

from clusterddp.data import randomness
from clusterddp.data.orders.order import ArrayOrder, Binding, BoundOrder, EpochOrder, Indices, Order
from clusterddp.data.orders.permutation import Permutation

_RANDPERM = "shuffled-1"


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


class _Permuted(ArrayOrder):
    def __init__(self, to: Binding) -> None:
        super().__init__("shuffled-2", to.of_epoch(to.length))
        self._permutation = lru_cache(2)(lambda epoch: Permutation(to.length, "shuffled", to.seed, epoch))

    def at(self, epoch: int, places: Indices) -> Indices:
        return self._permutation(epoch)(places)


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
