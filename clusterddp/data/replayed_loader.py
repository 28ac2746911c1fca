"""An iterable of batches without a state, such as torch's DataLoader: a resume reads its batches again from the start.

The loader draws from generators of its own, seeded at the beginning of each pass, so that what it draws does not depend
on what the script does between two batches, or did not do before a resume.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from clusterddp.data import randomness
from clusterddp.data.passes import Passes
from clusterddp.distributed.process_group import ProcessGroup
from clusterddp.errors import CheckpointError
from clusterddp.reporter import counted, say
from clusterddp.worker import signals

_BETTER = "ctx.loader() finds its place at once, clusterddp.streams has datasets for large files"


class ReplayedLoader(Passes):
    """Any iterable of this rank's batches, with the methods of ``Loader``.

    Attributes:
        taken: how many batches it has handed out.
    """

    per_rank_state = False

    def __init__(self, loader: Any, group: ProcessGroup, seed: int) -> None:
        super().__init__(loader)
        self._group, self._seed = group, seed
        self.taken = 0
        self._stream: Iterator[Any] | None = None
        self._generators = randomness.states()
        if group.rank == 0:
            say(f"{self._name} has no state_dict(): a resume reads its batches again from the start; {_BETTER}")

    @property
    def inexact(self) -> list[str]:
        """Nobody knows whether it gives the same batches again."""
        return [f"{self._name} has no state: exact only if it repeats its batches"]

    def batches(self, step: int) -> Iterator[Any]:
        """From the current position, which may be before that of ``step``. The loader stays open for the next loop."""
        if self._stream is None or self.taken > step:
            self._stream, self.taken, self._passes = self._batches(), 0, 0
        return self._counted(self._stream)

    def _counted(self, stream: Iterator[Any]) -> Iterator[Any]:
        for batch in stream:
            self.taken += 1
            yield batch

    def _iter(self) -> Any:
        for part in self._parts():
            if hasattr(part, "set_epoch"):
                part.set_epoch(self._passes)
        with randomness.preserved(), signals.blocked(self._loader):
            # Equal on all ranks: they may each take their part of one random order.
            randomness.seed_all(randomness.hash32("pass", self._seed, self._passes))
            iterator = iter(self._loader)
            self._generators = randomness.states()
        return iterator

    def _next(self, iterator: Any, end: Any) -> Any:
        with randomness.preserved():
            randomness.set_states(self._generators)
            batch = next(iterator, end)
            self._generators = randomness.states()
        return batch

    def _parts(self) -> Iterator[Any]:
        """The loader, and what orders its samples."""
        loader = self._loader
        yield loader
        for part in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
            yield part
            yield getattr(part, "sampler", None)
        yield getattr(loader, "dataset", None)

    def replay(self, count: int, iterator: Iterator[Any], at_batch: Callable[[], None]) -> None:
        """Takes batches until there were ``count``; rank 0 says how long that took. ``at_batch``: before each one."""
        again, started = count - self.taken, time.monotonic()
        while self.taken < count:
            at_batch()
            next(iterator)
        if again > 0 and self._group.rank == 0:
            say(
                f"{self._name} has no state_dict(): reading its first {counted(again, 'batch', 'batches')} again took "
                f"{time.monotonic() - started:.1f} s; {_BETTER}, torchdata's StatefulDataLoader saves its position"
            )

    def gather(self) -> None:
        """Nothing to do: the position follows from the step."""

    def progress(self, _step: int) -> dict[str, Any]:
        """What a checkpoint stores about the loader."""
        return {"epoch": self._passes, "loaders": None}

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Raises CheckpointError if the run started with another kind of loader, or on another number of ranks."""
        if progress.get("loaders", self) is not None:
            raise CheckpointError(
                f"the run did not start with a loader without state_dict(), and ctx.run() now got {self._name}, which "
                "has none: pass the loader that the run started with, or start a new run"
            )
        if (ranks := progress["world_size"]) != self._group.world_size:
            raise CheckpointError(
                f"the run read its batches from {self._name} on {ranks} ranks, and there are now "
                f"{self._group.world_size}: use {ranks} ranks, or ctx.loader(), which works with any number"
            )
