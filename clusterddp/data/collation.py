"""torch's ``default_collate``, faster for the most frequent samples: tuples with tensors in them, rows of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import TensorDataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

#: Rows of such tensors are gathered in one operation.
_GATHERED = frozenset(
    getattr(torch, name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
)


def is_torchs(collate: Callable[..., Any] | None) -> bool:
    """Whether a loader's ``collate_fn`` is torch's, and calls nothing that the script has registered there."""
    if collate is not None and collate is not default_collate:
        return False
    return all(function.__module__ == default_collate.__module__ for function in default_collate_fn_map.values())


def collated(samples: list[Any]) -> Any:
    """What ``default_collate`` makes of samples; only outside of workers, which put batches into shared memory."""
    if type(samples[0]) is not tuple:
        return default_collate(samples)
    try:
        columns = [*zip(*samples, strict=True)]
    except (TypeError, ValueError):
        return default_collate(samples)  # which says what is wrong with them
    return [_column(column) for column in columns]


def _column(values: tuple[Any, ...]) -> Any:
    first = values[0]
    if type(first) is torch.Tensor and first.layout is torch.strided and not first.is_nested:
        return torch.stack(values)
    return default_collate(values)  # type: ignore[arg-type]  # a tuple, which it returns of text


class Rows:
    """The batches of a TensorDataset, as torch's ``default_collate`` makes them of its samples, but each in one
    operation per tensor. Reading them draws no random number."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._dataset, self._tensors = dataset, dataset.tensors

    @staticmethod
    def of(dataset: Any) -> Rows | None:
        """None for other datasets, and for tensors whose rows might be laid out in another way."""
        if type(dataset) is not TensorDataset or not all(map(_is_plain, dataset.tensors)):
            return None
        return Rows(dataset)

    def batch(self, indices: Sequence[int]) -> list[torch.Tensor] | None:
        """The rows with these indices; None once the script has given the dataset other tensors."""
        if self._dataset.tensors is not self._tensors:
            return None
        rows = torch.tensor(indices, device="cpu")
        return [tensor.index_select(0, rows) for tensor in self._tensors]


def _is_plain(tensor: Any) -> bool:
    plain = type(tensor) is torch.Tensor and tensor.is_cpu and tensor.layout is torch.strided
    return plain and tensor.dtype in _GATHERED and tensor.is_contiguous() and not tensor.requires_grad
