"""The orders of a dataset: shuffled, in sequence or weighted, and the parts of every order.

A run takes its samples from one endless stream. Step s with global batch B takes positions s * B to (s + 1) * B - 1,
and each rank its slice of them. An order is a pure function from a position to the sample there, so that the
position is all that a checkpoint needs, any step is found at once, and the number of ranks is free.

Shuffled and in sequence: each sample once per epoch. Random permutations need no list, because the image of any place
is computed from a key. They use only integer arithmetic of this module: numpy and torch may change their permutations
between versions, and a run must keep its order.

Weighted: samples are drawn with replacement, each with a probability in proportion to its weight. Draw p of the endless
stream is a function of (seed, p) alone: a random point below the sum of all weights, and the sample whose weight covers
it. The weights are summed over blocks. A draw finds its block by bisection and its sample within the block, so that
10^9 weights need 8 million sums. Weights and labels may be lists, arrays, memory maps or tensors.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import operator
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch

#: (epoch, index), or (epoch, index, draw) if an epoch may have a sample twice. All of it seeds the random augmentation,
#: so that equal samples of a stream get the same one.
Sample: TypeAlias = tuple[Any, ...]

Indices = npt.NDArray[np.int64]
#: Samples that are drawn in one call, where shares are small.
AT_ONCE = 4096

#: Samples, transposed: all epochs, all indices, and all draws if there are some.
Columns: TypeAlias = Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Binding:
    """The seed, global batch and number of samples of a run, to which an order is bound."""

    length: int
    seed: int
    global_batch: int
    #: Whether each epoch ends at a whole global batch.
    drop_last: bool = False

    def of_epoch(self, samples: int) -> int:
        """How many of an epoch's samples are taken: with ``drop_last`` none if they are fewer than a global batch."""
        return samples // self.global_batch * self.global_batch if self.drop_last else samples


class BoundOrder(ABC):
    """The endless stream of a run's samples: epochs that all have ``length`` samples.

    Attributes:
        label: recorded in a checkpoint. The same label and length mean the same stream.
        length: samples per epoch. 0 if ``drop_last`` leaves none.
    """

    #: Whether an epoch may have a sample twice: the number of the draw then makes them different.
    repeats = False

    def __init__(self, label: str, length: int) -> None:
        self.label, self.length = label, length

    @abstractmethod
    def indices(self, epoch: int, start: int, stop: int) -> list[Any]:
        """The samples at places ``start`` to ``stop`` - 1 of an epoch."""

    def samples(self, start: int, stop: int) -> list[Sample]:
        """The samples at positions ``start`` to ``stop`` - 1 of the endless stream."""
        found: list[Sample] = []
        while start < stop:
            epoch, first = divmod(start, self.length)
            last = min(first + stop - start, self.length)
            draws = [range(first, last)] if self.repeats else []
            found += zip(repeat(epoch), self.indices(epoch, first, last), *draws)
            start += last - first
        return found

    def shares(self, start: int, size: int, stride: int) -> Iterator[Columns]:
        """Without end: the ``size`` samples from ``start`` on, those from ``start`` + ``stride`` on, and so forth."""
        for first in itertools.count(start, stride):
            yield tuple(zip(*self.samples(first, first + size), strict=True))


class Order(ABC):
    """An order of samples that is not bound yet: made by a function of ``clusterddp.orders``, for ``ctx.loader``."""

    @abstractmethod
    def bind(self, to: Binding) -> BoundOrder:
        """The stream of a run. Raises TypeError and ValueError if the order does not fit the dataset."""


class ArrayOrder(BoundOrder):
    """An order that draws samples at any places of an epoch in one call of numpy."""

    @abstractmethod
    def at(self, epoch: int, places: Indices) -> Indices:
        """The samples at these places of an epoch, which ascend."""

    def indices(self, epoch: int, start: int, stop: int) -> list[Any]:
        found: list[int] = self.at(epoch, np.arange(start, stop)).tolist()
        return found

    def shares(self, start: int, size: int, stride: int) -> Iterator[Columns]:
        """Draws small shares together, up to an epoch, because a call takes 40 us for few places and 140 for 4096 in
        the usual order.
        """
        at_once = max(1, min(AT_ONCE // size, self.length // stride))
        places = (np.arange(at_once)[:, None] * stride + np.arange(size)).ravel()
        for first in itertools.count(start, at_once * stride):
            columns = self._drawn(first, places)
            rows = [
                repeat((column,) * size) if isinstance(column, int) else column.reshape(-1, size).tolist()
                for column in columns
            ]
            yield from zip(*rows)  # noqa: B905

    def _drawn(self, first: int, places: Indices) -> tuple[Indices | int, ...]:
        """The samples this many places behind position ``first``: their epochs or epoch, indices, and draws."""
        epoch, inside = divmod(first, self.length)
        if inside + int(places[-1]) < self.length:
            epochs: Indices | int = epoch
            draws = places + inside
            found = self.at(epoch, draws)
        else:
            numbers, draws = np.divmod(places + inside, self.length)
            found = draws.copy()
            for number in range(int(numbers[0]), int(numbers[-1]) + 1):
                of = slice(*np.searchsorted(numbers, (number, number + 1)))
                found[of] = self.at(epoch + number, found[of])
            epochs = numbers + epoch
        return (epochs, found, draws) if self.repeats else (epochs, found)


def short_hash(*parts: Any) -> str:
    """The hash in a label: eight hex digits from texts, numbers and arrays."""
    digest = hashlib.blake2b(digest_size=4)
    for part in parts:
        digest.update(np.ascontiguousarray(part).data if isinstance(part, np.ndarray) else repr(part).encode())
    return digest.hexdigest()


Words = npt.NDArray[np.uint64]

#: Up to this length a permutation is a table: exactly uniform, where few rounds on few bits would not be.
_TABLE = 4096
_ROUNDS = 6
_30, _27, _31, _32 = (np.uint64(bits) for bits in (30, 27, 31, 32))
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def keys(*parts: int | str) -> Words:
    """Eight 64-bit numbers from numbers and names."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=64).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def mixed(words: Words) -> Words:
    """Maps each number to one that looks random: the finalizer of splitmix64 (Steele, Lea and Flood, 2014)."""
    words = words ^ (words >> _30)
    words *= _FIRST
    words ^= words >> _27
    words *= _SECOND
    words ^= words >> _31
    return words


class Permutation:
    """A permutation of 0 to ``length`` - 1, which differs with ``parts``.

    Long ones are a Feistel network (Black and Rogaway 2002) on a rectangle of a x b >= length places, whose sides are
    about equal. Fewer than a of its places are no samples. A sample that gets one of them passes the network again.
    """

    def __init__(self, length: int, *parts: int | str) -> None:
        self._length, self._keys = length, keys(*parts)
        self._a = math.isqrt(max(length - 1, 0)) + 1
        self._b = -(-length // self._a)
        self._table: npt.NDArray[np.int64] | None = None
        if length <= _TABLE:
            self._table = np.argsort(mixed(np.arange(length, dtype=np.uint64) + self._keys[0]), kind="stable")

    def __call__(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The image of each place."""
        if self._table is not None:
            return self._table[places]
        found = self._network(places.astype(np.uint64))
        while (outside := np.flatnonzero(found >= np.uint64(self._length))).size:
            found[outside] = self._network(found[outside])
        return found.astype(np.int64)

    def _network(self, places: Words) -> Words:
        a, b = np.uint64(self._a), np.uint64(self._b)
        left = places // b
        right = places - left * b
        for number in range(0, _ROUNDS, 2):
            left = _added(left, right, self._keys[number], a)
            right = _added(right, left, self._keys[number + 1], b)
        places = left * b
        places += right
        return places


def _added(half: Words, other: Words, key: np.uint64, size: np.uint64) -> Words:
    """Adds a random function of the other half to a half, modulo its size."""
    words = other + key
    words *= _FIRST
    words ^= words >> _32
    words *= _SECOND
    words >>= _32
    words *= size
    words >>= _32  # the upper 32 bits of a product: a random number below the size
    words += half
    return np.minimum(words, words - size)  # modulo: the sum is below 2 * size, and a negative difference wraps around


class Shuffled(Order):
    """Each epoch in its own random order."""

    def bind(self, to: Binding) -> BoundOrder:
        return _Permuted(to)


class Sequential(Order):
    """The dataset's own order in each epoch."""

    def bind(self, to: Binding) -> BoundOrder:
        return _InSequence("sequential", to.of_epoch(to.length))


class _InSequence(BoundOrder):
    def indices(self, epoch: int, start: int, stop: int) -> list[int]:  # noqa: ARG002
        return list(range(start, stop))


class _Permuted(ArrayOrder):
    def __init__(self, to: Binding) -> None:
        super().__init__("shuffled-2", to.of_epoch(to.length))
        self._permutation = lru_cache(2)(lambda epoch: Permutation(to.length, "shuffled", to.seed, epoch))

    def at(self, epoch: int, places: Indices) -> Indices:
        return self._permutation(epoch)(places)


#: Weights that are read at once when they are summed.
_CHUNK = 1 << 20
_GOLDEN, _11 = np.uint64(0x9E3779B97F4A7C15), np.uint64(11)

Floats = npt.NDArray[np.float64]
Array = npt.NDArray[Any]


class Weighted(Order):
    """``weights``: per sample or, with ``labels``, per class.

    A sum is kept for at most this many blocks of samples. If there are not more samples, a block is one sample.
    """

    def __init__(self, weights: Any, labels: Any, num_samples: int | None, most_blocks: int = 1 << 23) -> None:
        self._weights = _array_of(weights, "weights")
        self._labels = None if labels is None else _labels(labels)
        if self._labels is not None:
            _check_labels(self._labels, self._weights.size)
        self._num_samples = None if num_samples is None else _count_of(num_samples)
        self._most_blocks = most_blocks
        self._table: _Table | None = None

    def bind(self, to: Binding) -> BoundOrder:
        per_sample = self._weights if self._labels is None else self._labels
        if per_sample.size != to.length:
            name = "weights" if self._labels is None else "labels"
            raise ValueError(f"{name}: expected one per sample, got {per_sample.size} for a dataset of {to.length}")
        if self._table is None:
            self._table = _Table(self._weights, self._labels, self._most_blocks)
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

    def __init__(self, weights: Array, labels: Array | None, most_blocks: int) -> None:
        self._classes = None if labels is None else weights
        of = weights if labels is None else labels
        self._block = 1 << max(0, (-(-of.size // most_blocks) - 1).bit_length())
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
            raise ValueError("weights: expected at least one above 0, but all are 0")
        if not np.isfinite(self._ends[-1]):
            raise ValueError("weights: their sum is too large for a float. Divide all of them by the largest")

    def _weights(self, of: Array) -> Floats:
        """The weights of stored values, which are weights or labels."""
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
        """The weights of all samples in each block. 0 beyond the last sample."""
        found = np.zeros((blocks.size, self._block))
        whole = blocks < len(self._blocks)
        found[whole] = self._weights(self._blocks[blocks[whole]])
        found[~whole, : self._rest.size] = self._weights(self._rest)
        return found


def _array_of(values: Any, name: str) -> Array:
    """One-dimensional numbers as an array: a view, where possible, so that a memory map stays on disk.

    Raises TypeError for anything else.
    """
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    found = np.asanyarray(values)
    if found.ndim != 1 or found.dtype.kind not in "biuf":
        raise TypeError(
            f"{name}: expected a one-dimensional array of numbers, got {type(values).__name__} with {_shape(found)}"
        )
    return cast(Array, found)


def _shape(values: Array) -> str:
    return f"shape {values.shape}" if values.ndim != 1 else f"dtype {values.dtype}"


def _count_of(num_samples: Any) -> int:
    """As Python's int, which a checkpoint can record. Raises TypeError or ValueError."""
    try:
        number = None if isinstance(num_samples, bool) else operator.index(num_samples)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"num_samples is {num_samples!r}, expected the number of draws per epoch as a whole number")
    if number < 1:
        raise ValueError(f"num_samples is {number}, expected the number of draws per epoch, 1 or more")
    return number


def _check_weights(values: Floats, start: int) -> None:
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if wrong.size:
        raise ValueError(
            f"weights: the weight of sample {start + wrong[0]} is {values[wrong[0]]}, expected a finite number, 0 or "
            "more"
        )


def _labels(values: Any) -> Array:
    """Booleans as numbers, because numpy would take them for a mask."""
    found = _array_of(values, "labels")
    return found.view(np.uint8) if found.dtype.kind == "b" else found


def _check_labels(labels: Array, classes: int) -> None:
    if labels.dtype.kind not in "iu":
        raise TypeError(f"labels: expected an integer class index for each sample, got {labels.dtype}")
    if labels.size and (labels.min() < 0 or labels.max() >= classes):
        raise ValueError(
            f"labels are {labels.min()} to {labels.max()}, but there are weights for classes 0 to {classes - 1}"
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
