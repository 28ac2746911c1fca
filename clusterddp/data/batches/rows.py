"""Batches of a TensorDataset, whose samples are rows of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import TensorDataset

from clusterddp.data.batches.memory import batch_of

#: Rows of such tensors are gathered in one operation.
_GATHERED = frozenset(
    getattr(torch, name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
)


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
        return [torch.index_select(one, 0, rows, out=batch_of(one[0], len(indices))) for one in self._tensors]


def _is_plain(tensor: Any) -> bool:
    plain = type(tensor) is torch.Tensor and tensor.is_cpu and tensor.layout is torch.strided
    return plain and tensor.dtype in _GATHERED and tensor.is_contiguous() and not tensor.requires_grad
