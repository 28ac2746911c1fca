"""Datasets over large files, the shards, for ``ctx.loader``, with direct access to each sample.

They have a length and an index, so a run resumes exactly, on any number of ranks and workers, in any order.
``orders.by_shard()`` reads nearly in sequence. The positions of the samples are found once and kept in an index file.
Shards are local files or files of a shared disk.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from clusterddp.data import shard_formats
from clusterddp.data.shard_formats import Indexed, Sharded
from clusterddp.data.shards import Paths, found, patterns_of

__all__ = ["JsonLines", "TarShards", "Tokens"]


class TarShards(Indexed):
    """Samples of uncompressed tar archives, as webdataset has them.

    Neighbouring files with the same name up to the first dot are a sample: ``000.jpg`` and ``000.cls``. It is a dict
    with the bytes of each file by its extension, in lower case, and ``__key__`` (``000``) and ``__url__`` (the shard's
    path).

    Args:
        files: a path, a pattern such as ``data/train-*.tar``, or a list of them. The samples are in the order of the
            sorted paths.
        decode: makes a sample of that dict, in the worker that reads it.
        index: the folder of the index file. None: next to the first shard.

    Raises FileNotFoundError for a pattern without a file, ValueError for an archive that is compressed, damaged or cut,
    has more data after its end, as archives joined by ``cat`` have, or has a sample's files apart, and OSError if the
    index cannot be written.

    Example::

        with ctx.main_first():  # rank 0 builds the index, unless there is one
            dataset = streams.TarShards("data/train-*.tar", decode)
        loader = ctx.loader(dataset, batch_size=64, order=orders.by_shard(), num_workers=4)
    """

    def __init__(
        self,
        files: Paths,
        decode: Callable[[dict[str, Any]], Any] | None = None,
        *,
        index: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__("tar", files, index, decode, shard_formats.scan_archive)

    def _sample(self, path: str, number: int, within: int) -> Any:  # noqa: ARG002
        start, data = self._bytes(path, number)
        try:
            key, files = shard_formats.sample(data, start)
        except ValueError as error:
            raise ValueError(f"{path}, sample at byte {start}: {error}") from None
        sample = {"__key__": key, "__url__": path, **files}
        try:
            return sample if self._decode is None else self._decode(sample)
        except Exception as error:
            if sys.version_info >= (3, 11):
                error.add_note(f"in sample {key!r} of {path}")
            raise


class JsonLines(Indexed):
    """The lines of text files, one sample each, parsed as JSON. Empty lines are left out.

    Args:
        files: a path, a pattern such as ``data/*.jsonl``, or a list of them. The samples are in the order of the sorted
            paths.
        decode: makes a sample of a line's bytes, in the worker that reads it.
        index: the folder of the index file. None: next to the first shard.

    Raises FileNotFoundError for a pattern without a file, ValueError for a compressed file, and OSError if the index
    cannot be written.

    Example: ``dataset = streams.JsonLines("data/*.jsonl")``
    """

    def __init__(
        self, files: Paths, decode: Callable[[bytes], Any] = json.loads, *, index: str | os.PathLike[str] | None = None
    ) -> None:
        super().__init__("lines", files, index, decode, shard_formats.scan_lines)

    def _sample(self, path: str, number: int, within: int) -> Any:  # noqa: ARG002
        start, line = self._bytes(path, number)
        assert self._decode is not None
        try:
            return self._decode(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line at byte {start}: {error}") from error


class Tokens(Sharded):
    """Blocks of files of token numbers, such as ``numpy.array(tokens, dtype).tofile(path)`` writes.

    Sample i of a file is tokens i * ``length`` to (i + 1) * ``length`` - 1 and, as its target, the tokens that follow
    each of them: two int64 tensors. A remainder at the end of a file that is too short for a block is ignored. Needs
    no index file, because the files' sizes determine the blocks.

    Args:
        files: a path, a pattern such as ``data/*.bin``, or a list of them. The samples are in the order of the sorted
            paths.
        length: tokens per block.
        dtype: of a token in the files.

    Raises FileNotFoundError for a pattern without a file, ValueError for a file without a whole number of tokens, and
    for a type other than integers.

    Example: ``dataset = streams.Tokens("data/*.bin", length=1024)``
    """

    def __init__(self, files: Paths, length: int, dtype: npt.DTypeLike = "uint16") -> None:
        self._length, self._dtype = length, np.dtype(dtype)
        if type(length) is not int or length < 1:
            raise ValueError(f"length is {length!r}: expected the number of tokens per block, 1 or more")
        if self._dtype.kind not in "iu":
            raise ValueError(f"dtype is {self._dtype}: expected an integer type, such as uint16")
        shards = found(patterns_of(files))
        for shard in shards:
            if shard.size % self._dtype.itemsize:
                raise ValueError(
                    f"{shard.path} has {shard.size} bytes, which is not a multiple of the size of {self._dtype}"
                )
        super().__init__(shards, [max(0, shard.size // self._dtype.itemsize - 1) // length for shard in shards])

    def _sample(self, path: str, number: int, within: int) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002
        size = self._dtype.itemsize
        data = self._files.read(path, within * self._length * size, (self._length + 1) * size)
        tokens = torch.from_numpy(np.frombuffer(data, dtype=self._dtype).astype(np.int64))
        return tokens[:-1], tokens[1:]
