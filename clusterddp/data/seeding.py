"""Each sample's own random numbers: its generators are seeded from (seed, epoch, index), so that it is the same in any
worker, after any resume and on any number of ranks.

Seeding torch, ``random`` and numpy takes longer than reading a cheap sample. Most samples draw nothing, and most others
from one of the three only. Generators that no sample is known to draw from are therefore watched while a batch is read:
if they are unchanged, no sample depends on them. Otherwise the batch is read again, and from then on those that were
drawn from are seeded for each sample. Whichever way a sample is read, it is the same.

The global generators that a sample may draw from, one by one: seeded, or watched for draws.

Seeding all of them takes 8 us, of which ``random`` takes 5. To watch one takes less: it gets a fixed state, and later
either gives the number that follows, or something has drawn from it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from clusterddp.data import randomness
from clusterddp.data.sample_order import Columns

#: Any constant: from it the fixed states are made.
FIXED = randomness.hash32("unused")


class Generator(Protocol):
    """A global generator. ``watch`` gives it the fixed state."""

    @property
    def seed(self) -> Callable[[int], Any]: ...
    def watch(self) -> None: ...
    def drew(self) -> bool:
        """Whether it was drawn from since ``watch``. To be called once."""


class _Torch:
    """The state is taken after a draw, which computes the next 624 numbers, because copying them is faster."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(FIXED)
        torch.rand((), generator=generator)
        self._state = generator.get_state()
        self._number = torch.empty((), dtype=torch.float64, device="cpu")
        self._next = self._number.uniform_(generator=generator).item()
        self.seed = torch.default_generator.manual_seed

    def watch(self) -> None:
        torch.default_generator.set_state(self._state)

    def drew(self) -> bool:
        return self._number.uniform_().item() != self._next


class _Python:
    """Of the module ``random``."""

    def __init__(self) -> None:
        generator = random.Random(FIXED)
        generator.random()
        self._state, self._next = generator.getstate(), generator.random()
        self.seed = random.seed

    def watch(self) -> None:
        random.setstate(self._state)

    def drew(self) -> bool:
        return random.random() != self._next


class _Numpy:
    """Setting a state takes longer than seeding."""

    def __init__(self) -> None:
        self._next = np.random.RandomState(FIXED).random_sample()
        self.seed = np.random.seed

    def watch(self) -> None:
        np.random.seed(FIXED)

    def drew(self) -> bool:
        return bool(np.random.random() != self._next)


class _Gpus:
    """Of all GPUs of a rank that reads samples itself. A draw adds to the offset, so that no fixed state is needed."""

    def __init__(self) -> None:
        self._offsets: list[int] = []

    def seed(self, seed: int) -> None:
        for generator in randomness.gpu_generators():
            generator.manual_seed(seed)

    def watch(self) -> None:
        self._offsets = self._now()

    def drew(self) -> bool:
        return self._now() != self._offsets

    def _now(self) -> list[int]:
        return [generator.get_offset() for generator in randomness.gpu_generators()]


ALL: tuple[Generator, ...] = (_Torch(), _Python(), _Numpy())


#: The samples of a batch, transposed: workers get them faster like this.
Batch: TypeAlias = Columns


class SeededSamples(Dataset[Any]):
    """A dataset whose samples are named by an order, and read in batches, each with its own seed.

    Args:
        collate: the loader's ``collate_fn``. Any but torch's own may also draw.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, collate: Callable[..., Any] | None = None) -> None:
        self.dataset = dataset
        self._prefix, self._collate = f"('sample', {seed!r}, ", collate
        self._begun = self._collate_may_draw = False
        #: Empty before the first batch, because workers that are not forked have their own generators.
        self._batches: Callable[[list[Any]], Any] | None = None
        self._generators: tuple[Generator, ...] = ()
        self._drawn: tuple[Generator, ...] = ()
        self._watched: tuple[Generator, ...] = ()

    def __getitems__(self, batch: Batch) -> list[Any]:
        """The samples of a batch. The generators stay as after seeding the last one, for a ``collate_fn``."""
        if self._begun:
            return self._some(batch)
        self._begin()  # most datasets draw for each sample or for none, and then only one batch is read twice
        first, others = ([column[place] for column in batch] for place in (slice(1), slice(1, None)))
        return [*self._some(first), *(self._some(others) if others[0] else [])]

    def _begin(self) -> None:
        self._begun = True
        self._collate_may_draw = not _is_torchs(self._collate)
        own_gpus = randomness.gpu_generators() and get_worker_info() is None
        self._generators = (*ALL, _Gpus()) if own_gpus else ALL
        self._watched = self._generators
        batches = getattr(self.dataset, "__getitems__", None)
        self._batches = batches if callable(batches) else None

    def _some(self, batch: Batch) -> list[Any]:
        while (found := self._read(batch)) is None:
            pass
        if self._watched and self._collate_may_draw:
            (seed,) = self._seeds([column[-1:] for column in batch])
            for generator in self._watched:
                generator.seed(seed)
        return found

    def _read(self, batch: Batch) -> list[Any] | None:
        """The samples, or None if reading them has drawn from a watched generator, which is seeded from then on."""
        for generator in self._watched:
            generator.watch()
        try:
            if self._drawn:
                found = self._each(batch)
            elif self._batches is not None:
                found = list(self._batches(list(batch[1])))
            else:
                dataset = self.dataset
                found = [dataset[index] for index in batch[1]]
        except Exception:
            if self._unchanged():
                raise
            return None  # it may have failed because of what it drew
        return found if self._unchanged() else None

    def _unchanged(self) -> bool:
        """Whether the watched generators were not drawn from. Those that were are seeded from now on."""
        drew = [generator for generator in self._watched if generator.drew()]
        if not drew:
            return True
        self._drawn = tuple(one for one in self._generators if one in self._drawn or one in drew)
        self._watched = tuple(generator for generator in self._watched if generator not in drew)
        return False

    def _each(self, batch: Batch) -> list[Any]:
        """One sample after another, each with its seed."""
        dataset, drawn, found = self.dataset, self._drawn, []
        for seed, index in zip(self._seeds(batch), batch[1], strict=True):
            for generator in drawn:
                generator.seed(seed)
            found.append(dataset[index])
        return found

    def _seeds(self, batch: Batch) -> list[int]:
        """``hash32("sample", seed, *sample)`` of each sample, in half the time: all at once."""
        digest, prefix = randomness.hash_of, self._prefix
        if len(batch) == 2:
            return [digest(f"{prefix}{epoch!r}, {index!r})") for epoch, index in zip(*batch, strict=True)]
        return [digest(f"{prefix}{', '.join(map(repr, sample))})") for sample in zip(*batch, strict=True)]


def _is_torchs(collate: Callable[..., Any] | None) -> bool:
    """Whether a loader's ``collate_fn`` is torch's, and calls nothing that the script has registered there."""
    if collate is not None and collate is not default_collate:
        return False
    return all(function.__module__ == default_collate.__module__ for function in default_collate_fn_map.values())
