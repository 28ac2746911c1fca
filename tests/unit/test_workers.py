"""What the workers of a loader begin with."""

from __future__ import annotations

import gc
from typing import Any

from torch.utils.data import Dataset

from clusterddp.data.loader import Loader
from clusterddp.data.sample_order import Shuffled


class Frozen(Dataset[Any]):
    """Each sample is the number of objects that its process has taken out of garbage collection."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> int:
        return gc.get_freeze_count()


def test_what_a_worker_begins_with_is_left_out_of_its_garbage_collections() -> None:
    gc.unfreeze()  # what other tests have left out
    found = []
    for workers in (0, 1):
        stream = Loader(Frozen(), 1, order=Shuffled(), seed=1, rank=0, world_size=1, num_workers=workers).batches(0)
        found.append(next(stream).item())
        stream.close()  # type: ignore[attr-defined]
    assert found[0] == 0 and found[1] > 1000
