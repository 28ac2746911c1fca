"""A map-style dataset over shards: the samples of the first shard, then those of the second, and so on."""

from __future__ import annotations

import bisect
import operator
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from clusterddp.data.streams import index_file
from clusterddp.data.streams.index_file import Rows, Scan
from clusterddp.data.streams.shards import Files, Paths, Shard, folder_of, found, patterns_of


class Sharded(Dataset[Any]):
    """Knows how many samples each shard has, and reads one as ``_sample`` of a subclass does."""

    def __init__(self, shards: list[Shard], counts: list[int]) -> None:
        self._paths = [shard.path for shard in shards]
        self._ends: list[int] = np.cumsum(counts, dtype=np.int64).tolist()
        self._files = Files()

    @property
    def shards(self) -> list[str]:
        """The files, in the order of their samples."""
        return list(self._paths)

    @property
    def shard_lengths(self) -> npt.NDArray[np.int64]:
        """The number of samples in each shard."""
        ends = np.array([0, *self._ends], dtype=np.int64)
        return ends[1:] - ends[:-1]

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        number = operator.index(index)
        number += len(self) if number < 0 else 0
        if not 0 <= number < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        shard = bisect.bisect_right(self._ends, number)
        return self._sample(self._paths[shard], number, number - (self._ends[shard - 1] if shard else 0))

    def _sample(self, path: str, number: int, within: int) -> Any:
        """The sample of this number in the dataset and within its shard."""
        raise NotImplementedError


class Indexed(Sharded):
    """Samples that are stretches of bytes; the index is memory-mapped, by each worker for itself."""

    def __init__(
        self,
        kind: str,
        files: Paths,
        index: str | os.PathLike[str] | None,
        decode: Callable[[Any], Any] | None,
        scan: Scan,
    ) -> None:
        patterns = patterns_of(files)
        shards = found(patterns)
        folder = Path(index).absolute() if index is not None else folder_of(shards)
        loaded = index_file.loaded(index_file.place(folder, kind, patterns), shards, scan)
        super().__init__(shards, loaded.counts)
        self._index, self._tail, self._decode = loaded.path, loaded.tail, decode
        self._rows: Rows | None = loaded.rows

    def _bytes(self, path: str, number: int) -> tuple[int, bytes]:
        """Where a sample begins in its shard, and its bytes."""
        if self._rows is None:
            self._rows = index_file.mapped(self._index, len(self), self._tail)
        start, size = self._rows[number].tolist()
        try:
            return start, self._files.read(path, start, size)
        except ValueError as error:
            raise ValueError(f"{error}; if the file is complete, delete its index {self._index}") from None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rows": None}
