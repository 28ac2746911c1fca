"""Each sample's own random numbers: its generators are seeded from (seed, epoch, index), so that it is the same in any
worker, after any resume and on any number of ranks.

Seeding torch, ``random`` and numpy takes longer than reading a cheap sample, and most samples draw nothing. A batch is
therefore read from generators with a fixed state first; if that state is unchanged, no sample depends on it. Once a
sample has drawn, it is read again with its own seed, as are all samples from then on. Whichever way a sample is read,
it is the same.
"""

from __future__ import annotations

import random
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import Dataset

from clusterddp.data import randomness
from clusterddp.data.orders.order import Sample

#: The samples of a batch, transposed: workers get them faster like this.
Batch: TypeAlias = tuple[tuple[Any, ...], ...]


class SeededSamples(Dataset[Any]):
    """A dataset whose samples are named by an order, and read with their own seeds.

    Attributes:
        always: whether every sample is seeded, as in runs of older versions. Differs only for samples that look at a
            generator and draw nothing, such as at ``torch.initial_seed()``.

    Args:
        collated: whether a ``collate_fn`` of the script follows, which may draw: torch's draws nothing.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, collated: bool = True) -> None:
        self.dataset, self._seed, self._collated = dataset, seed, collated
        self.always = False
        self._begun = self._draws = False

    def __getitem__(self, sample: Sample) -> Any:
        self._seed_for(sample)
        return self.dataset[sample[1]]

    def __getitems__(self, batch: Batch) -> list[Any]:
        """The samples of a batch; for a ``collate_fn``, the generators are left as after seeding the last one."""
        if self._begun:
            return self._some(batch)
        self._begun = True  # most datasets draw for each sample or for none: of those only one is read twice
        first, others = (tuple(column[place] for column in batch) for place in (slice(1), slice(1, None)))
        return self._some(first) + self._some(others)

    def _some(self, batch: Batch) -> list[Any]:
        if batch[0] and not (self.always or self._draws):
            found = self._unseeded(list(batch[1]))
            if found is not None:
                if self._collated:
                    self._seed_for(tuple(column[-1] for column in batch))
                return found
            self._draws = True
        return [self[sample] for sample in zip(*batch, strict=True)]

    def _unseeded(self, indices: list[Any]) -> list[Any] | None:
        """The samples, or None if reading one of them has drawn random numbers."""
        randomness.set_unused()
        try:
            found = self._read(indices)
        except Exception:
            if _next_numbers() == _UNDRAWN:
                raise
            return None  # it may have failed because of what it drew
        return found if _next_numbers() == _UNDRAWN else None

    def _read(self, indices: list[Any]) -> list[Any]:
        if callable(batch := getattr(self.dataset, "__getitems__", None)):
            return list(batch(indices))
        return [self.dataset[index] for index in indices]

    def _seed_for(self, sample: Sample) -> None:
        randomness.seed_all(randomness.hash32("sample", self._seed, *sample))


#: Takes what is drawn: making a tensor takes longer than drawing one number.
_DRAWN = torch.empty((), dtype=torch.float64, device="cpu")


def _next_numbers() -> tuple[float, ...]:
    """A number from each generator."""
    return random.random(), _DRAWN.uniform_().item(), np.random.random()


def _undrawn() -> tuple[float, ...]:
    with randomness.preserved():
        randomness.set_unused()
        return _next_numbers()


_UNDRAWN = _undrawn()
