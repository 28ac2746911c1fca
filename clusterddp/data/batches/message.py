"""What a worker sends of a batch: its small tensors in the message itself rather than in shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from clusterddp.data.batches.memory import SMALL

#: Lists that are longer hold samples rather than columns.
_MOST_COLUMNS = 64


class InMessage:
    """A loader's ``collate_fn`` in its workers: what ``collate`` makes, to be sent in this way."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> Any:
        return _packed(self._collate(samples), {})


class _Small:
    """A tensor; what is sent of it makes a tensor in the rank."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> Any:
        of = self._tensor
        return _tensor, (of.reshape(-1).view(torch.uint8).numpy().tobytes(), of.dtype, tuple(of.shape))


def _tensor(content: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=dtype).view(shape)


def _packed(value: Any, known: dict[int, _Small]) -> Any:
    """``known``: a tensor that a batch has twice is one tensor in the rank, too."""
    kind = type(value)
    if kind is torch.Tensor:
        return known.setdefault(id(value), _Small(value)) if _is_small(value) else value
    if kind is dict:
        return {key: _packed(one, known) for key, one in value.items()}
    if kind in (list, tuple) and len(value) <= _MOST_COLUMNS:
        return kind(_packed(one, known) for one in value)
    return value


def _is_small(value: torch.Tensor) -> bool:
    """Whether the tensor's bytes are all that there is to it: other kinds are sent as torch does it.

    Those that share their memory with others still do so in the rank.
    """
    return (
        value.layout is torch.strided
        and 0 < value.nbytes <= SMALL
        and value.is_cpu
        and value.is_contiguous()
        and not (value._is_view() or value.requires_grad or value.is_nested or value.is_quantized)
        and not (value.is_conj() or value.is_neg())
    )
