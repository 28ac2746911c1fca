"""torch's ``default_collate``, faster for the most frequent samples: tuples with tensors in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map


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
