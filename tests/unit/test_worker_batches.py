"""Batches of workers have the values of those that the rank itself would read; torch decides on their strides."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from clusterddp.data.loader import Loader
from clusterddp.data.sample_orders import Shuffled

#: Bytes of a large tensor.
LARGE = 128 << 10
KINDS: dict[str, Callable[[int], Any]] = {
    "many": lambda i: {
        "small": (torch.tensor([i, i]), torch.tensor(i), i, 0.5 * i, str(i)),
        "dtypes": [torch.tensor([i % 2]).to(dtype) for dtype in (torch.bool, torch.bfloat16, torch.complex64)],
        "large": torch.full((LARGE,), i, dtype=torch.uint8),
        "empty": torch.zeros(0, 3),
        "nothing": (),
    },
    "channels_last": lambda i: torch.full((2, 3, 4, 4), i).to(memory_format=torch.channels_last),
    "large": lambda i: (torch.full((3, LARGE // 8), 1.0 * i) + torch.rand(()), i),
}


class Made(Dataset[Any]):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        return KINDS[self.kind](index)


def told(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: told(one) for key, one in value.items()}
    return (type(value), [told(one) for one in value]) if isinstance(value, (list, tuple)) else value


def batches(kind: str, workers: int, **options: Any) -> list[Any]:
    loader = Loader(Made(kind), 3, order=Shuffled(), seed=1, rank=0, world_size=1, num_workers=workers, **options)
    stream = loader.batches(0)
    found = [told(batch) for batch in itertools.islice(stream, 5)]
    stream.close()  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_workers_are_the_same(kind: str) -> None:
    assert batches(kind, 1) == batches(kind, 0)


class Frozen(Made):
    def __getitem__(self, index: int) -> int:
        return gc.get_freeze_count()


def test_what_a_worker_begins_with_is_left_out_of_its_garbage_collections() -> None:
    gc.unfreeze()  # what other tests have left out
    found = []
    for workers in (0, 1):
        stream = Loader(Frozen(""), 1, order=Shuffled(), seed=1, rank=0, world_size=1, num_workers=workers).batches(0)
        found.append(next(stream).item())
        stream.close()  # type: ignore[attr-defined]
    assert found[0] == 0 and found[1] > 1000
