"""Training without a loader: reinforcement learning, simulation, a server of data; each step gets its number."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from clusterddp.errors import CheckpointError


class NoLoader:
    """Has the methods of ``Loader``."""

    per_rank_state = False
    #: Nothing is ever split.
    share = batch_size = 1
    workers = 0
    inexact: tuple[str, ...] = ()

    def epoch(self, _step: int) -> NoReturn:
        """Raises TypeError."""
        raise self._no("epoch")

    def ends_epoch(self, _step: int) -> NoReturn:
        """Raises TypeError."""
        raise self._no("end_of_epoch")

    def steps_in(self, _epochs: float) -> NoReturn:
        """Raises TypeError."""
        raise self._no("epochs()")

    def _no(self, name: str) -> TypeError:
        return TypeError(
            f"run.{name} is not available without a loader: give ctx.run() a loader=, or count steps with run.step and "
            "run.steps()"
        )

    def batches(self, step: int) -> Iterator[int]:
        """The steps' numbers, from ``step`` on."""
        yield from itertools.count(step)

    def gather(self) -> None:
        """Nothing to do."""

    def progress(self, _step: int) -> dict[str, Any]:
        """Nothing is stored."""
        return {}

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Raises CheckpointError if the run started with a loader."""
        if "dataset_length" in progress or "loaders" in progress:
            raise CheckpointError(
                "the run started with a loader, and ctx.run() now got none: pass the loader again, or start a new run"
            )
