"""Each sample's own random numbers: its generators are seeded from (seed, epoch, index), so that it is the same in any
worker, after any resume and on any number of ranks.

Seeding torch, ``random`` and numpy takes longer than reading a cheap sample. Most samples draw nothing, and most others
from one of the three only. Generators that no sample is known to draw from are therefore watched while a batch is read:
if they are unchanged, no sample depends on them. Otherwise the batch is read again, and from then on those that were
drawn from are seeded for each sample. Whichever way a sample is read, it is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from torch.utils.data import Dataset

from clusterddp.data import randomness
from clusterddp.data.batches.collation import Joined, has_large, is_torchs, joined
from clusterddp.data.batches.rows import Rows
from clusterddp.data.generators import ALL, Generator
from clusterddp.data.orders.order import Columns

#: The samples of a batch, transposed: workers get them faster like this.
Batch: TypeAlias = Columns
#: What is seeded for a sample: all generators, as in runs of older versions; all, once any sample has drawn; those that
#: samples draw from. The samples differ only if they look at a generator that they do not draw from, such as at
#: ``torch.initial_seed()``.
SEEDED = ALWAYS, DRAWING, DRAWN = "always", "drawing", "drawn"


class SeededSamples(Dataset[Any]):
    """A dataset whose samples are named by an order, and read in batches, each with its own seed.

    Args:
        collate: the loader's ``collate_fn``: any but torch's own may draw, too.

    Attributes:
        seeded: ALWAYS, DRAWING or DRAWN.
        may_join: whether batches may be made while samples are read, for ``collated``.
    """

    may_join = False

    def __init__(self, dataset: Dataset[Any], seed: int, collate: Callable[..., Any] | None = None) -> None:
        self.dataset, self.seeded = dataset, DRAWN
        self._prefix, self._collate = f"('sample', {seed!r}, ", collate
        self._begun = self._collate_may_draw = self._joins = False
        self._rows: Rows | None = None
        #: Nothing before the first batch, as workers that are not forked have generators of their own.
        self._batches: Callable[[list[Any]], Any] | None = None
        self._drawn: tuple[Generator, ...] = ()
        self._watched: tuple[Generator, ...] = ()

    def __getitems__(self, batch: Batch) -> list[Any] | Joined:
        """The samples of a batch; the generators are left as after seeding the last one, for a ``collate_fn``."""
        if self._begun:
            if self._rows is not None and self.may_join and (rows := self._rows.batch(batch[1])) is not None:
                return Joined(rows)
            return self._some(batch)  # type: ignore[no-any-return]
        self._begin()  # most datasets draw for each sample or for none: of those only one is read twice
        first, others = ([column[place] for column in batch] for place in (slice(1), slice(1, None)))
        samples = [*self._some(first), *(self._some(others) if others[0] else [])]
        self._joins = self._batches is None and has_large(samples[0])
        return samples

    def _begin(self) -> None:
        self._begun = True
        self._collate_may_draw = self.seeded != DRAWN or not is_torchs(self._collate)
        self._drawn, self._watched = (ALL, ()) if self.seeded == ALWAYS else ((), ALL)
        batches = getattr(self.dataset, "__getitems__", None)
        self._batches = batches if callable(batches) else None
        self._rows = Rows.of(self.dataset)

    def _some(self, batch: Batch) -> Any:
        while (found := self._read(batch)) is None:
            pass
        if self._watched and self._collate_may_draw:
            (seed,) = self._seeds([column[-1:] for column in batch])
            for generator in self._watched:
                generator.seed(seed)
        return found

    def _read(self, batch: Batch) -> list[Any] | Joined | None:
        """The samples, or None if reading them has drawn from a generator that is only watched; no longer, then."""
        for generator in self._watched:
            generator.watch()
        try:
            if self._joins and self.may_join:
                found: list[Any] | Joined = joined(self._each(batch), len(batch[1]))
            elif self._drawn:
                found = [*self._each(batch)]
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
        """Whether nothing was drawn from generators that are only watched; else they are seeded from now on."""
        drew = [generator for generator in self._watched if generator.drew()]
        if not drew:
            return True
        if self.seeded == DRAWING:
            self._drawn, self._watched = ALL, ()
        else:
            self._drawn = tuple(generator for generator in ALL if generator in self._drawn or generator in drew)
            self._watched = tuple(generator for generator in self._watched if generator not in drew)
        return False

    def _each(self, batch: Batch) -> Iterator[Any]:
        """One sample after another, with its seed where samples draw."""
        dataset, drawn = self.dataset, self._drawn
        if not drawn:
            for index in batch[1]:
                yield dataset[index]
            return
        for seed, index in zip(self._seeds(batch), batch[1], strict=True):
            for generator in drawn:
                generator.seed(seed)
            yield dataset[index]

    def _seeds(self, batch: Batch) -> list[int]:
        """``hash32("sample", seed, *sample)`` of each sample, in half the time: all at once."""
        digest, prefix = randomness.hash_of, self._prefix
        if len(batch) == 2:
            return [digest(f"{prefix}{epoch!r}, {index!r})") for epoch, index in zip(*batch, strict=True)]
        return [digest(f"{prefix}{', '.join(map(repr, sample))})") for sample in zip(*batch, strict=True)]
