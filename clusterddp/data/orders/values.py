"""Arguments of orders that are many numbers: weights, lengths and labels, as lists, arrays, memory maps or tensors."""

from __future__ import annotations

import hashlib
import operator
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

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
        raise TypeError(f"{name}: expected numbers in one dimension, got {type(values).__name__} of {_shape(found)}")
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
        raise TypeError(f"{name} is {value!r}: expected {meaning}, a whole number")
    if number < 1:
        raise ValueError(f"{name} is {number}: expected {meaning}, 1 or more")
    return number


def check_length(values: Array, length: int, name: str) -> None:
    """Raises ValueError unless there is one per sample."""
    if values.size != length:
        raise ValueError(f"{name}: expected one per sample, got {values.size} for a dataset of {length}")


def short_hash(*parts: Any) -> str:
    """Of a label: eight hex digits from texts, numbers and arrays."""
    digest = hashlib.blake2b(digest_size=4)
    for part in parts:
        digest.update(np.ascontiguousarray(part).data if isinstance(part, np.ndarray) else repr(part).encode())
    return digest.hexdigest()
