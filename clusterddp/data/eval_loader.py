"""The samples of an evaluation: each once over all ranks, with points between the batches where the run can stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.data import Dataset

from clusterddp.data.device import pinned, to_device
from clusterddp.data.loader_options import checked
from clusterddp.data.workers import ShieldedDataLoader, close

_ORDERING = {"sampler", "batch_sampler", "drop_last", "order"}


class EvalLoader:
    """The evaluation samples of this rank, each once over all ranks: made by ``Context.eval_loader``.

    Rank r has samples r, r + world_size, ... in order. ``at_batch`` is called before each batch, equally often on every
    rank, even where a rank's share is a batch shorter: all ranks can stop together there. ``len()`` is this rank's
    number of batches.

    Attributes:
        dataset: the dataset.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        rank: int,
        world_size: int,
        at_batch: Callable[[], None],
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
        device: torch.device | None = None,
        pins_here: bool = False,
        **options: Any,
    ) -> None:
        if clash := _ORDERING & options.keys():
            raise TypeError(
                f"{', '.join(sorted(clash))}: ctx.eval_loader() takes each sample once, in the dataset's order; leave "
                "it out, or loop over your own DataLoader with ctx.stop_requested()"
            )
        length, batch_size = checked(dataset, batch_size, options)
        share = range(rank, length, world_size)
        self.dataset = dataset
        self._loader = ShieldedDataLoader(dataset, batch_size=batch_size, sampler=share, **options)
        self._most = math.ceil(math.ceil(length / world_size) / batch_size)
        self._copies, self._pins_here = to_device(device), pins_here
        self._at_batch, self._around = at_batch, around

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        with self._around():
            yield from self._batches()

    def _batches(self) -> Iterator[Any]:
        iterator = iter(self._loader)
        batches = map(pinned, iterator) if self._pins_here else iterator
        try:
            for number in range(self._most):
                self._at_batch()
                if number < len(self):
                    batch = next(batches)
                    yield batch if self._copies is None else self._copies.take(self._copies.begin(batch))
        finally:
            if not self._loader.persistent_workers:
                close(iterator)
