"""Workers that start before the run's state is restored, so that they read the first batches meanwhile.

They have the dataset as it is then, and the script may change it between ``ctx.run()`` and ``run.steps()``, for example
by the values that a resume restores. It is therefore compared with what the workers got before they are used: by its
pickle. A dataset that cannot be pickled, or is large, is not read early. What the pickle does not contain, the script
sets before ``ctx.run()``: variables and attributes of classes in imported modules.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import torch

from clusterddp.data.workers import close

#: The largest pickle that is compared: 10 ms at most.
_MOST_BYTES = 8 << 20


@dataclass(frozen=True)
class EarlyStart:
    """An iterator whose workers have started. ``place``: where it begins; ``contents``: what the workers got."""

    iterator: Iterator[Any]
    place: Any
    contents: bytes

    def take(self, place: Any, what: Any) -> Iterator[Any] | None:
        """The iterator, if it begins at ``place`` and the workers have ``what`` as it is now; else ends the workers."""
        if place == self.place and digest(what) == self.contents:
            return self.iterator
        close(self.iterator)
        return None


def digest(what: Any) -> bytes | None:
    """A hash of an object's pickle; None if it has none, or a large one."""
    content = _Content()
    with suppress(Exception):  # pickling runs the script's own methods
        _Pickler(content, protocol=5, buffer_callback=content.add_buffer).dump(what)
        return content.hash.digest()
    return None


class _TooLarge(Exception):
    pass


class _Content:
    """The file that a pickle is written to: only hashed."""

    def __init__(self) -> None:
        self.hash, self._size = hashlib.blake2b(digest_size=16), 0

    def write(self, data: Any) -> None:
        view = memoryview(data)
        self.check(view.nbytes)
        self._size += view.nbytes
        self.hash.update(view)

    def add_buffer(self, buffer: pickle.PickleBuffer) -> None:
        """An array's memory, which is not copied into the pickle."""
        self.write(buffer.raw())

    def check(self, size: int) -> None:
        """Raises _TooLarge if ``size`` more bytes are too many."""
        if self._size + size > _MOST_BYTES:
            raise _TooLarge


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Also pickles what a script defines itself, by value."""

    def __init__(self, content: _Content, **options: Any) -> None:
        super().__init__(content, **options)
        self._content = content

    def reducer_override(self, obj: Any) -> Any:
        """Refuses what would first be copied as a whole."""
        if isinstance(obj, (torch.Tensor, np.ndarray)):
            self._content.check(obj.nbytes)
        return super().reducer_override(obj)
