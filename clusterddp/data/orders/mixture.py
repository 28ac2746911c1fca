"""Several datasets in one stream, with weights that may change at given steps; each is passed through again and again.

Between two changes the stream consists of rounds, in which every dataset has a fixed number of samples, and a round of
blocks, over which these are spread evenly. How many samples of each dataset came before a block is therefore a product
and a sum, so that any position is found at once. Within a block the datasets are in a random order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch.utils.data import ConcatDataset

from clusterddp.data.orders.order import Binding, BoundOrder, Order, Sample
from clusterddp.data.orders.permutation import Permutation
from clusterddp.data.orders.values import short_hash

#: Samples per round: the finest share of a dataset is 1 / _ROUND. And per block.
_ROUND, _BLOCK = 100_000, 4000

Indices = npt.NDArray[np.int64]
#: By the datasets' names where ``ctx.loader`` is given a dict, else in their order.
Weights: TypeAlias = Mapping[str, float] | Sequence[float]


class Mixture(Order):
    """``changes``: other weights from the steps on that are their keys."""

    def __init__(
        self, weights: Weights, changes: Mapping[int, Weights], shuffle: bool, num_samples: int | None
    ) -> None:
        if wrong := [step for step in changes if not isinstance(step, int) or step < 1]:
            raise ValueError(f"changes: {wrong[0]!r} is not the number of a step, 1 or more")
        if num_samples is not None and num_samples < 1:
            raise ValueError(f"num_samples is {num_samples}: expected the number of samples per epoch, 1 or more")
        self._weights = [(0, weights), *sorted(changes.items())]
        self._shuffle, self._num_samples = shuffle, num_samples

    def dataset(self, given: Any) -> ConcatDataset[Any]:
        """All datasets, one after another."""
        if isinstance(given, ConcatDataset):
            return given
        names = list(given) if isinstance(given, Mapping) else None
        datasets = list(given.values()) if isinstance(given, Mapping) else given
        if not isinstance(datasets, (list, tuple)) or not datasets:
            raise TypeError(
                f"a mixture needs several datasets, such as ctx.loader({{'web': web, 'books': books}}, ...); got "
                f"{type(given).__name__}"
            )
        if empty := [number for number, dataset in enumerate(datasets) if not len(dataset)]:
            raise ValueError(f"dataset {names[empty[0]] if names else empty[0]} has no samples")
        return _Joined(datasets, names)

    def bind(self, to: Binding, label: str | None = None) -> BoundOrder:  # noqa: ARG002
        lengths = np.diff([0, *to.dataset.cumulative_sizes])
        names = getattr(to.dataset, "names", None) or range(lengths.size)
        pieces = [(step * to.global_batch, _shares(weights, names)) for step, weights in self._weights]
        return _Mixed(lengths, pieces, self._shuffle, to.of_epoch(self._num_samples or to.length), to.seed)


class _Joined(ConcatDataset[Any]):
    """``names``: of the datasets, if they have some."""

    def __init__(self, datasets: Sequence[Any], names: list[str] | None) -> None:
        super().__init__(datasets)
        self.names = names


def _shares(weights: Weights, names: Sequence[Any]) -> Indices:
    """Samples of each dataset in a whole round."""
    if isinstance(weights, Mapping):
        if weights.keys() != set(names):
            raise ValueError(f"weights for {_listed(weights)}, and the datasets are {_listed(names)}")
        weights = [weights[name] for name in names]
    values = np.asarray(weights, dtype=np.float64)
    if values.shape != (len(names),):
        raise ValueError(f"weights: expected one for each of {len(names)} datasets, got {weights!r}")
    if not (np.isfinite(values).all() and (values >= 0).all() and values.sum() > 0):
        raise ValueError(f"weights: expected 0 or more, and not all 0; got {weights!r}")
    shares = _split(_ROUND, values / values.sum())
    if (shares[values > 0] == 0).any():
        raise ValueError(f"weights: the smallest share of a dataset is one in {_ROUND}, got {weights!r}")
    return shares


def _listed(names: Any) -> str:
    return ", ".join(map(str, names))


def _split(samples: int, fractions: npt.NDArray[np.float64]) -> Indices:
    """A number in whole parts of about these fractions, by the largest remainders."""
    exact = samples * fractions
    parts = np.floor(exact).astype(np.int64)
    missing = samples - int(parts.sum())
    parts[np.argsort(parts - exact, kind="stable")[:missing]] += 1
    return parts


def _spread(shares: Indices) -> Indices:
    """How many samples of each dataset come before each block of a round, and in the whole round."""
    left, found = shares.copy(), [np.zeros_like(shares)]
    while total := int(left.sum()):
        size = min(_BLOCK, total)
        parts, remainders = np.divmod(left * size, total)
        parts[np.argsort(-remainders, kind="stable")[: size - int(parts.sum())]] += 1
        left -= parts
        found.append(found[-1] + parts)
    return np.stack(found)


class _Piece:
    """The samples between two changes: whole rounds, then one that ends with the piece."""

    def __init__(self, start: int, stop: int | None, shares: Indices, before: Indices) -> None:
        self.start, self._shares, self._before = start, shares, before
        whole, rest = divmod(stop - start, _ROUND) if stop is not None else (None, 0)
        self._whole, self._rest = whole, _split(rest, shares / _ROUND)
        #: Samples of each dataset by the end of the piece.
        self.drawn = before if whole is None else before + whole * shares + self._rest
        self._spread = _spread(shares)
        self._spread_of_rest = _spread(self._rest)

    def block(self, position: int) -> tuple[int, Indices, Indices]:
        """The block at a position: where it begins, its samples of each dataset, and those before it."""
        number, inside = divmod(position - self.start, _ROUND)
        spread = self._spread_of_rest if number == self._whole else self._spread
        block = inside // _BLOCK
        first = self.start + number * _ROUND + block * _BLOCK
        return first, spread[block + 1] - spread[block], self._before + number * self._shares + spread[block]


class _Mixed:
    """The bound order."""

    def __init__(
        self, lengths: Indices, pieces: list[tuple[int, Indices]], shuffle: bool, length: int, seed: int
    ) -> None:
        self.length, self._lengths, self._shuffle, self._seed = length, lengths, shuffle, seed
        self._first = np.cumsum(lengths) - lengths
        shares = short_hash(shuffle, *(part for piece in pieces for part in piece))
        self.label = f"mixture-1 ({_listed(lengths)} samples, {length} per epoch, weights {shares})"
        self._pieces: list[_Piece] = []
        drawn = np.zeros_like(lengths)
        for (start, of_round), (stop, _) in zip(pieces, [*pieces[1:], (None, None)], strict=True):
            self._pieces.append(_Piece(start, stop, of_round, drawn))
            drawn = self._pieces[-1].drawn
        self._starts = [piece.start for piece in self._pieces]
        self._block = lru_cache(4)(self._block_at)
        self._pass = lru_cache(4 * lengths.size)(self._permutation_of_pass)

    def samples(self, start: int, stop: int) -> list[Sample]:
        """(pass through the dataset, index in all datasets) at positions ``start`` to ``stop`` - 1."""
        found: list[Sample] = []
        while start < stop:
            piece = self._pieces[bisect_right(self._starts, start) - 1]
            first, shares, before = piece.block(start)
            which, number = self._block(first, tuple(shares))
            inside = slice(start - first, stop - first)
            found += self._of(which[inside], (before[which] + number)[inside])
            start = first + which.size
        return found

    def _block_at(self, first: int, shares: tuple[int, ...]) -> tuple[Indices, Indices]:
        """Which dataset each sample of a block is from, and how many of the same dataset come before it there."""
        which = np.repeat(np.arange(len(shares)), shares)[self._places(first, sum(shares))]
        in_turn = np.argsort(which, kind="stable")
        number = np.empty_like(which)
        number[in_turn] = np.arange(which.size) - np.repeat(np.cumsum(shares) - shares, shares)
        return which, number

    def _places(self, first: int, size: int) -> Indices:
        return Permutation(size, "mixture", self._seed, first)(np.arange(size))

    def _of(self, which: Indices, numbers: Indices) -> Iterator[Sample]:
        """The samples with these numbers in the endless passes through their datasets."""
        passes, inside = np.divmod(numbers, self._lengths[which])
        if self._shuffle:
            for dataset in np.unique(which):
                of = np.flatnonzero(which == dataset)
                for number in np.unique(passes[of]):
                    now = of[passes[of] == number]
                    inside[now] = self._pass(int(dataset), int(number))(inside[now])
        return zip(passes.tolist(), (inside + self._first[which]).tolist(), strict=True)

    def _permutation_of_pass(self, which: int, number: int) -> Permutation:
        return Permutation(int(self._lengths[which]), "mixture pass", self._seed, which, number)
