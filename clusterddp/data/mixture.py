"""Several datasets in one stream, with weights that may change at given steps. Each has passes without end.

Between two changes the stream consists of rounds, in which every dataset has a fixed number of samples, and a round of
blocks, over which these are spread evenly. How many samples of each dataset came before a block is therefore a product
and a sum, so that any position is found at once. Within a block the datasets are in a random order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch.utils.data import ConcatDataset, IterableDataset

from clusterddp.data.sample_order import (
    Binding,
    BoundOrder,
    Indices,
    Order,
    Permutation,
    Sample,
    ScheduledOrder,
    optional_count,
    short_hash,
)
from clusterddp.errors import CheckpointMismatch

#: Samples per round: the finest share of a dataset is 1 / _ROUND. And per block.
_ROUND, _BLOCK = 100_000, 4000

#: By the datasets' names if ``ctx.loader`` gets a dict, else in their order.
Weights: TypeAlias = Mapping[str, float] | Sequence[float]
#: From a position on, the number of samples of each dataset in a round, and the position where that was to end.
Given: TypeAlias = tuple[int, list[int]]
Planned: TypeAlias = tuple[int, int | None, list[int]]


class Mixture(Order):
    """``changes``: new weights, by the step from which on they hold."""

    def __init__(
        self, weights: Weights, changes: Mapping[int, Weights], shuffle: bool, num_samples: int | None
    ) -> None:
        if wrong := [step for step in changes if type(step) is not int or step < 1]:
            raise ValueError(f"changes: expected a step number of at least 1, got {wrong[0]!r}")
        self._weights = [(0, weights), *sorted(changes.items())]
        self._num_samples = optional_count(num_samples, "num_samples", "the number of samples per epoch")
        self._shuffle = shuffle

    def dataset(self, given: Any) -> ConcatDataset[Any]:
        """All datasets, one after another."""
        if isinstance(given, ConcatDataset):
            _check_samples(given.datasets, None)
            return given
        names = list(given) if isinstance(given, Mapping) else None
        datasets = list(given.values()) if isinstance(given, Mapping) else given
        if not isinstance(datasets, (list, tuple)) or not datasets:
            raise TypeError(
                f"a mixture needs several datasets, such as ctx.loader({{'web': web, 'books': books}}, ...), got "
                f"{type(given).__name__}"
            )
        _check_samples(datasets, names)
        return _Joined(datasets, names)

    def bind(self, to: Binding, label: str | None = None) -> BoundOrder:  # noqa: ARG002
        lengths = np.diff([0, *to.dataset.cumulative_sizes])
        names = getattr(to.dataset, "names", None) or range(lengths.size)
        given = [(step * to.global_batch, _shares(weights, names).tolist()) for step, weights in self._weights]
        length = to.of_epoch(self._num_samples or to.length)
        return _Mixed(lengths, given, self._shuffle, length, to.seed, _Words(list(map(str, names)), to.global_batch))


def _check_samples(datasets: Sequence[Any], names: Sequence[Any] | None) -> None:
    """Raises TypeError for a dataset without a length, ValueError for one without samples."""
    for name, dataset in zip(names or range(len(datasets)), datasets, strict=True):
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise TypeError(f"dataset {name} ({type(dataset).__name__}) has no length, which a mixture needs")
        if not len(dataset):
            raise ValueError(f"dataset {name} has no samples. Leave it out")


class _Joined(ConcatDataset[Any]):
    """``names``: of the datasets, if they have some."""

    def __init__(self, datasets: Sequence[Any], names: list[str] | None) -> None:
        super().__init__(datasets)
        self.names = names


def _shares(weights: Weights, names: Sequence[Any]) -> Indices:
    """Samples of each dataset in a whole round."""
    if isinstance(weights, Mapping):
        if weights.keys() != set(names):
            raise ValueError(f"weights are for {_listed(weights)}, but the datasets are {_listed(names)}")
        weights = [weights[name] for name in names]
    values = np.asarray(weights, dtype=np.float64)
    if values.shape != (len(names),):
        raise ValueError(f"weights: expected one weight per dataset ({len(names)}), got {weights!r}")
    if not (np.isfinite(values).all() and (values >= 0).all() and values.any()):
        raise ValueError(f"weights: expected finite numbers, 0 or more, and not all 0, got {weights!r}")
    with np.errstate(over="ignore"):
        total = values.sum()
    if not np.isfinite(total):
        raise ValueError(
            f"weights: expected a sum that fits into a float, got {weights!r}. Divide all weights by the largest"
        )
    shares = _split(_ROUND, values / total)
    if (shares[values > 0] == 0).any():
        raise ValueError(f"weights: the share of a dataset must be 0, or at least one in {_ROUND}, got {weights!r}")
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


def _planned(given: Sequence[Given]) -> list[Planned]:
    stops = [*(start for start, _ in given[1:]), None]
    return [(start, stop, shares) for (start, shares), stop in zip(given, stops, strict=True)]


def _first_difference(one: Sequence[Given], other: Sequence[Given]) -> int | None:
    """The first position at which two runs of weights differ, or one has a change. None if there is none."""
    for mine, others in zip_longest(one, other):
        if mine != others:
            return min(change[0] for change in (mine, others) if change is not None)
    return None


@dataclass(frozen=True)
class _Words:
    """The parts of a mixture in a user's words."""

    names: Sequence[str]
    global_batch: int

    def weights(self, given: Sequence[Given], position: int) -> str:
        """The shares at a position, and the changes behind it."""
        first = max(number for number, (start, _) in enumerate(given) if start <= position)
        later = [f"from step {self.step(start)} on {self._shares(shares)}" for start, shares in given[first + 1 :]]
        return "; ".join([self._shares(given[first][1]), *later])

    def _shares(self, shares: Sequence[int]) -> str:
        return ", ".join(f"{name} {100 * part / _ROUND:g}%" for name, part in zip(self.names, shares, strict=True))

    def step(self, position: int) -> int:
        """The step that takes the sample at a position, if no batches are skipped."""
        return position // self.global_batch


class _Piece:
    """The samples between two changes: whole rounds, then one that ends with the piece.

    ``stop``: where it was to end when its first samples were drawn. A change that is given later may end it before.
    """

    def __init__(self, start: int, stop: int | None, shares: Indices, before: Indices) -> None:
        self.start, self.stop, self.shares, self._before = start, stop, shares, before
        self._whole: int | None = None
        self._rest = np.zeros_like(shares)
        if stop is not None:
            self._whole, rest = divmod(stop - start, _ROUND)
            self._rest = _split(rest, shares / _ROUND)
        self._spread = _spread(shares)
        self._spread_of_rest = _spread(self._rest)

    @property
    def drawn(self) -> Indices:
        """Samples of each dataset by ``stop``."""
        assert self._whole is not None
        return self._before + self._whole * self.shares + self._rest

    def block(self, position: int) -> tuple[int, Indices, Indices]:
        """The block at a position: where it begins, its samples of each dataset, and those before it."""
        number, inside = divmod(position - self.start, _ROUND)
        spread = self._spread_of_rest if number == self._whole else self._spread
        block = inside // _BLOCK
        first = self.start + number * _ROUND + block * _BLOCK
        return first, spread[block + 1] - spread[block], self._before + number * self.shares + spread[block]


class _Mixed(ScheduledOrder):
    """The bound order. ``planned``: its pieces, (start, stop, shares), if weights were changed while the run paused."""

    def __init__(
        self,
        lengths: Indices,
        given: Sequence[Given],
        shuffle: bool,
        length: int,
        seed: int,
        words: _Words,
        planned: Sequence[Planned] | None = None,
    ) -> None:
        self.length, self._lengths, self._shuffle, self._seed = length, lengths, shuffle, seed
        self._first, self._given, self._words = np.cumsum(lengths) - lengths, given, words
        shares = short_hash(shuffle, *(part for start, of in given for part in (start, np.array(of, dtype=np.int64))))
        self.label = f"mixture-1 ({_listed(lengths)} samples, {length} per epoch, weights {shares})"
        self._block = lru_cache(4)(self._block_at)
        self._pass = lru_cache(4 * lengths.size)(self._permutation_of_pass)
        self._planned = _planned(given) if planned is None else planned
        self._pieces = self._made(self._planned)
        self._starts = [piece.start for piece in self._pieces]

    def _made(self, planned: Sequence[Planned]) -> list[_Piece]:
        made: list[_Piece] = []
        before = np.zeros_like(self._lengths)
        for start, stop, shares in planned:
            if made:
                before = self._drawn(made[-1], start)
            made.append(_Piece(start, stop, np.array(shares, dtype=np.int64), before))
        return made

    def _drawn(self, piece: _Piece, stop: int) -> Indices:
        """Samples of each dataset by the end of a piece, which may be before the planned one."""
        if stop == piece.stop:
            return piece.drawn
        first, shares, before = piece.block(stop)
        which, _ = self._block(first, tuple(shares))
        return before + np.bincount(which[: stop - first], minlength=before.size)

    @property
    def schedule(self) -> dict[str, Any]:
        """The weights as given, and the pieces that come of them."""
        facts = [*map(int, self._lengths), self.length, self._shuffle]
        return {"of": facts, "given": list(map(list, self._given)), "planned": list(map(list, self._planned))}

    def resumed(self, schedule: Mapping[str, Any], position: int) -> tuple[_Mixed, dict[str, str] | None]:
        """The order of a run that was at a position of a different schedule.

        Raises CheckpointError if its past differs.
        """
        if schedule["of"] != self.schedule["of"]:
            raise CheckpointMismatch("Use the same datasets, num_samples, drop_last and shuffle, or start a new run")
        old, words = [(start, shares) for start, shares in schedule["given"]], self._words
        planned = [(start, stop, shares) for start, stop, shares in schedule["planned"]]
        change = _first_difference(old, self._given)
        if change is None:
            return self._with(planned), None
        if change < position:
            raise CheckpointMismatch(
                f"Weights may change only from step {words.step(position)} on, where the run resumes, but the weights "
                f"of step {words.step(change)} differ. Keep earlier weights and changes as they were, or start a new "
                "run"
            )
        now = next(shares for start, shares in reversed(self._given) if start <= change)
        later = [(start, shares) for start, shares in self._given if start > change]
        planned = [piece for piece in planned if piece[0] < change] + _planned([(change, now), *later])
        changed = {"was": words.weights(old, position), "now": words.weights(self._given, position)}
        return self._with(planned), changed

    def _with(self, planned: Sequence[Planned]) -> _Mixed:
        return _Mixed(self._lengths, self._given, self._shuffle, self.length, self._seed, self._words, planned)

    def samples(self, start: int, stop: int) -> list[Sample]:
        """(pass through the dataset, index in all datasets) at positions ``start`` to ``stop`` - 1."""
        found: list[Sample] = []
        while start < stop:
            following = bisect_right(self._starts, start)
            first, shares, before = self._pieces[following - 1].block(start)
            which, number = self._block(first, tuple(shares))
            until = min(stop, first + which.size, *self._starts[following : following + 1])
            inside = slice(start - first, until - first)
            found += self._of(which[inside], (before[which] + number)[inside])
            start = until
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
