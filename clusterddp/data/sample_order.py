"""The parts of every order of samples: base classes, arguments, and permutations without a list.

A run takes its samples from one endless stream. Step s with global batch B takes positions s * B to (s + 1) * B - 1,
and each rank its slice of them. An order is a pure function from a position to the sample there, so that the
position is all that a checkpoint needs, any step is found at once, and the number of ranks is free.

Arguments of orders may be many numbers (weights, lengths and labels), as lists, arrays, memory maps or tensors. Random
permutations need no list, because the image of any place is computed from a key. They use only integer arithmetic of
this module: numpy and torch may change their permutations between versions, and a run must keep its order.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
_AT_ONCE = 4096

#: Samples, transposed: all epochs, all indices, and all draws if there are some.
Columns: TypeAlias = Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Binding:
    """The dataset, seed and global batch of a run, to which an order is bound."""

    dataset: Any
    length: int
    seed: int
    global_batch: int
    #: Whether each epoch ends at a whole global batch.
    drop_last: bool = False

    def of_epoch(self, samples: int) -> int:
        """How many of an epoch's samples are taken: with ``drop_last`` none if they are fewer than a global batch."""
        return samples // self.global_batch * self.global_batch if self.drop_last else samples


class BoundOrder(ABC):
    """The endless stream of a run's samples.

    Attributes:
        label: recorded in a checkpoint. The same label and length mean the same stream.
        length: samples per epoch. 0 if ``drop_last`` leaves none.
    """

    label: str
    length: int

    @abstractmethod
    def samples(self, start: int, stop: int) -> list[Sample]:
        """The samples at positions ``start`` to ``stop`` - 1."""

    def shares(self, start: int, size: int, stride: int) -> Iterator[Columns]:
        """Without end: the ``size`` samples from ``start`` on, those from ``start`` + ``stride`` on, and so forth."""
        for first in itertools.count(start, stride):
            yield tuple(zip(*self.samples(first, first + size), strict=True))


class ScheduledOrder(BoundOrder):
    """A bound order that changes at given steps. A resumed run may change future ones."""

    @property
    @abstractmethod
    def schedule(self) -> dict[str, Any]:
        """The schedule, for a checkpoint, which also has the label."""

    @abstractmethod
    def resumed(self, schedule: Mapping[str, Any], position: int) -> tuple[BoundOrder, dict[str, str] | None]:
        """The order of a run that was at a position of a different schedule, and the fields of event ``order_changed``.

        Both have the same samples up to the first change that differs. If there is none, the fields are None. Raises
        ValueError, with the remedy, if that change is before the position.
        """


class Order(ABC):
    """An order of samples that is not bound yet: made by a function of ``clusterddp.orders``, for ``ctx.loader``."""

    #: The label that a checkpoint of a version without labels stands for; None if that had no such order.
    unlabelled: str | None = None

    def dataset(self, given: Any) -> Any:
        """The map-style dataset that the indices belong to, made of the dataset given to ``ctx.loader``."""
        return given

    @abstractmethod
    def bind(self, to: Binding, label: str | None = None) -> BoundOrder:
        """The stream of a run. ``label``: of the checkpoint that it resumes from, to keep an older version's order.

        Raises TypeError and ValueError if the order does not fit the dataset.
        """


class EpochOrder(BoundOrder):
    """A bound order with epochs that all have ``length`` samples."""

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


class ArrayOrder(EpochOrder):
    """An order that draws samples at any places of an epoch in one call of numpy."""

    @abstractmethod
    def at(self, epoch: int, places: Indices) -> Indices:
        """The samples at these places of an epoch, which ascend. May change the array that it is given."""

    def indices(self, epoch: int, start: int, stop: int) -> list[Any]:
        found: list[int] = self.at(epoch, np.arange(start, stop)).tolist()
        return found

    def shares(self, start: int, size: int, stride: int) -> Iterator[Columns]:
        """Draws small shares together, up to an epoch, because a call takes 40 us for few places and 140 for 4096 in
        the usual order.
        """
        at_once = max(1, min(_AT_ONCE // size, self.length // stride))
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
            found = self.at(epoch, draws.copy())
        else:
            numbers, draws = np.divmod(places + inside, self.length)
            found = draws.copy()
            for number in range(int(numbers[0]), int(numbers[-1]) + 1):
                of = slice(*np.searchsorted(numbers, (number, number + 1)))
                found[of] = self.at(epoch + number, found[of].copy())
            epochs = numbers + epoch
        return (epochs, found, draws) if self.repeats else (epochs, found)


Array = npt.NDArray[Any]


def array_of(values: Any, name: str) -> Array:
    """One-dimensional numbers as an array: a view, where possible, so that a memory map stays on disk.

    Raises TypeError for anything else.
    """
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    found = np.asanyarray(values)
    if found.ndim != 1 or found.dtype.kind not in "biuf":
        raise TypeError(
            f"{name}: expected a one-dimensional array of numbers, got {type(values).__name__} of {_shape(found)}"
        )
    return cast(Array, found)


def _shape(values: Array) -> str:
    return f"shape {values.shape}" if values.ndim != 1 else f"type {values.dtype}"


def optional_count(value: Any, name: str, meaning: str) -> int | None:
    """``count_of``, or None for None."""
    return None if value is None else count_of(value, name, meaning)


def count_of(value: Any, name: str, meaning: str) -> int:
    """A number of at least 1 as Python's int, which a checkpoint can record. Raises TypeError or ValueError."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} is {value!r}, expected {meaning} as a whole number")
    if number < 1:
        raise ValueError(f"{name} is {number}, expected {meaning}, 1 or more")
    return number


def check_length(values: Array, length: int, name: str) -> None:
    """Raises ValueError unless there is one per sample."""
    if values.size != length:
        raise ValueError(f"{name}: expected one per sample, got {values.size} for a dataset of {length}")


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
