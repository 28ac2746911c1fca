"""Random permutations that need no list: the image of any place is computed from a key.

All of it is integer arithmetic of our own. numpy and torch may change their permutations between versions, and a run
must keep its order.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import numpy.typing as npt

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
    """Each number as another that looks random: the finalizer of splitmix64 (Steele, Lea and Flood, 2014)."""
    words = words ^ (words >> _30)
    words *= _FIRST
    words ^= words >> _27
    words *= _SECOND
    words ^= words >> _31
    return words


class Permutation:
    """A permutation of 0 to ``length`` - 1, for each ``parts`` another.

    Long ones are a Feistel network (Black and Rogaway 2002) on a rectangle of a x b >= length places, whose sides are
    about equal. Fewer than a of its places are no samples; a sample that gets one of them goes through again.
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
