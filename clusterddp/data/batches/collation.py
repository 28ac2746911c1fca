"""torch's ``default_collate``, faster for the most frequent samples: tensors, and tuples and dicts of them.

A large tensor is copied into the batch as soon as its sample has been read, while it is still in the CPU's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import default_collate, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from clusterddp.data.batches.memory import batch_of

#: Bytes of a tensor that is copied by itself, which takes 2 us more than as one of many.
_LARGE = 128 << 10


def is_torchs(collate: Callable[..., Any] | None) -> bool:
    """Whether a loader's ``collate_fn`` is torch's, and calls nothing that the script has registered there."""
    if collate is not None and collate is not default_collate:
        return False
    return all(function.__module__ == default_collate.__module__ for function in default_collate_fn_map.values())


@dataclass(frozen=True)
class Joined:
    """Samples that were made into a batch while they were read."""

    batch: Any


def collated(samples: Any) -> Any:
    """What ``default_collate`` makes of the samples."""
    if type(samples) is Joined:
        return samples.batch
    first = samples[0]
    if type(first) is not tuple:
        if type(first) is dict:
            return {key: _column([sample[key] for sample in samples]) for key in first}
        return _column(samples)
    try:
        columns = [*zip(*samples, strict=True)]
    except (TypeError, ValueError):
        return default_collate(samples)  # which says what is wrong with them
    return [_column(column) for column in columns]


def _column(values: Sequence[Any]) -> Any:
    first = values[0]
    if type(first) is not torch.Tensor or first.layout is not torch.strided or first.is_nested:
        return default_collate(values)  # type: ignore[arg-type]  # a tuple, which it returns of text
    if get_worker_info() is None or not first.is_contiguous():  # such samples' layout may be kept: in a worker, too
        return torch.stack(values)  # type: ignore[arg-type]
    found = torch.stack(values, out=batch_of(first, len(values)))  # type: ignore[arg-type]
    if found.requires_grad or found.dtype is not first.dtype:  # torch refuses some of these in a worker
        return default_collate(values)  # type: ignore[arg-type]
    return found


def has_large(sample: Any) -> bool:
    """Whether samples like this one are to be ``joined``."""
    return any(map(_is_large, _values(sample)))


def joined(samples: Iterator[Any], size: int) -> list[Any] | Joined:
    """The batch of so many samples, or a list of them if they are of different kinds, types or shapes."""
    first = next(samples)
    partial = _Partial(first, size)
    partial.add(first)
    del first  # so that its memory is used for the next ones
    for sample in samples:
        if not partial.add(sample):
            return [*partial.samples(), sample, *samples]
    return Joined(partial.batch())


def _values(sample: Any) -> Sequence[Any]:
    """The parts of a sample that ``collated`` makes columns of."""
    if type(sample) is dict:
        return tuple(sample.values())
    return sample if type(sample) is tuple else (sample,)


def _is_large(value: Any) -> bool:
    return _is_plain(value) and value.nbytes >= _LARGE


def _is_plain(value: Any) -> bool:
    """Contiguous, too: torch lays out a batch of others, such as images in channels_last, differently."""
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and value.is_cpu
        and value.is_contiguous()
        and not (value.requires_grad or value.is_nested or value.is_quantized)
    )


class _Partial:
    """A batch that samples like the first one are copied into."""

    def __init__(self, first: Any, size: int) -> None:
        self._kind, self._names, self._number = type(first), [*first] if type(first) is dict else [], 0
        kind = tuple if self._kind is tuple else list  # what default_collate returns of text
        self._columns = [_Copied(value, size) if _is_large(value) else _Kept(kind) for value in _values(first)]

    def add(self, sample: Any) -> bool:
        """Whether the sample is like the first one: else it is not added."""
        if type(sample) is not self._kind or (self._names and [*sample] != self._names):
            return False
        values = _values(sample)
        if len(values) != len(self._columns):
            return False
        for column, value in zip(self._columns, values, strict=True):
            if not column.put(self._number, value):
                return False
        self._number += 1
        return True

    def samples(self) -> list[Any]:
        """Those that were added."""
        rows = [*zip(*(column.values[: self._number] for column in self._columns), strict=True)]
        if self._kind is dict:
            return [dict(zip(self._names, row, strict=True)) for row in rows]
        return rows if self._kind is tuple else [row[0] for row in rows]

    def batch(self) -> Any:
        columns = [column.whole() for column in self._columns]
        if self._kind is dict:
            return dict(zip(self._names, columns, strict=True))
        return columns if self._kind is tuple else columns[0]


class _Copied:
    """A column of large tensors."""

    def __init__(self, first: torch.Tensor, size: int) -> None:
        found = batch_of(first, size)
        self._whole = first.new_empty((size, *first.shape)) if found is None else found
        self.values, self._shape, self._dtype = self._whole.unbind(), first.shape, first.dtype

    def put(self, number: int, value: Any) -> bool:
        """Whether the value fits into the column."""
        if not _is_plain(value) or value.dtype is not self._dtype or value.shape != self._shape:
            return False
        self.values[number].copy_(value)
        return True

    def whole(self) -> Any:
        return self._whole


class _Kept:
    """Any other column."""

    def __init__(self, kind: type[list[Any] | tuple[Any, ...]]) -> None:
        self.values: list[Any] = []
        self._kind = kind

    def put(self, number: int, value: Any) -> bool:  # noqa: ARG002
        self.values.append(value)
        return True

    def whole(self) -> Any:
        return _column(self._kind(self.values))
