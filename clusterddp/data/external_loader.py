"""A loader of another library or of the script's own: any iterable of batches with ``state_dict``/``load_state_dict``.

torchdata's StatefulDataLoader is one. Each rank has its own state, while only rank 0 writes checkpoints: all ranks
gather their states before a save, at a step known to all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch.distributed as dist

from clusterddp.data import randomness
from clusterddp.data.workers import close
from clusterddp.distributed.process_group import ProcessGroup
from clusterddp.errors import CheckpointError
from clusterddp.worker import signals

_END = object()


class StatefulLoader(Protocol):
    """A loader of batches that can save and restore its position."""

    def __iter__(self) -> Iterator[Any]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class ExternalLoader:
    """A StatefulLoader with the methods of ``Loader``, resumed by its own state rather than by the step.

    Raises TypeError for a loader without a state.
    """

    per_rank_state = True
    #: The number of samples per rank and step is the loader's own business: nothing is ever split.
    share = batch_size = 1

    def __init__(self, loader: StatefulLoader, group: ProcessGroup) -> None:
        self._loader, self._group = loader, group
        self._name = type(loader).__name__
        if not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
            raise TypeError(
                f"run(loader=...) was given a {self._name}, in which a run cannot resume: expected ctx.loader(), or a "
                "loader with state_dict() and load_state_dict(), such as torchdata's StatefulDataLoader"
            )
        self._passes = 0
        self._states: list[dict[str, Any]] = []
        #: Whether the loader has drawn from the global generators, whose state is not the loader's.
        self._drew = False

    @property
    def given(self) -> StatefulLoader:
        """The loader itself."""
        return self._loader

    @property
    def workers(self) -> int:
        """The number of processes that read for this rank; 0 if that is unknown."""
        return int(getattr(self._loader, "num_workers", 0))

    @property
    def inexact(self) -> list[str]:
        """Reasons why a resume may not be exact, as far as is known by now."""
        if getattr(self._loader, "num_workers", 0):
            return [f"the workers of {self._name} draw their own random numbers"]
        return [f"{self._name} draws from the global random generators"] if self._drew else []

    def epoch(self, _step: int) -> int:
        """The number of completed passes over the loader."""
        return self._passes

    def ends_epoch(self, _step: int) -> bool:
        """Unknown before the loader ends: raises TypeError."""
        raise TypeError(f"run.end_of_epoch is not available with {self._name}: use ctx.loader()")

    def steps_in(self, epochs: float) -> int:
        """The number of steps in so many passes over the loader, by its length."""
        try:
            return -int(-epochs * len(self._loader))  # type: ignore[arg-type]
        except TypeError:
            raise TypeError(f"{self._name} has no length: use run.steps() instead of run.epochs()") from None

    def batches(self, _step: int) -> Iterator[Any]:
        """Pass after pass, from the loader's current position."""
        empty = False
        while True:
            found = False
            before = randomness.states()
            with signals.blocked(self._loader):
                iterator = iter(self._loader)
            self._notice_draws(before)
            try:
                while True:
                    with randomness.preserved() as before:
                        batch = next(iterator, _END)
                        self._notice_draws(before)
                    if batch is _END:
                        break
                    found = True
                    yield batch
            except GeneratorExit:  # the loop has ended
                close(iterator)
                raise
            if empty and not found:  # one empty pass is fine: the state was saved after the last batch of a pass
                raise ValueError(f"{self._name} has no batches")
            empty = not found
            self._passes += 1

    def _notice_draws(self, before: randomness.States) -> None:
        self._drew = self._drew or not randomness.equal(before, randomness.states())

    def gather(self) -> None:
        """Brings the states of all ranks to rank 0. Collective."""
        states: list[Any] | None = [None] * self._group.world_size if self._group.rank == 0 else None
        dist.gather_object((self._loader.state_dict(), self._drew), states, dst=0)
        if states is not None:
            self._states = [state for state, _ in states]
            self._drew = any(drew for _, drew in states)

    def progress(self, _step: int) -> dict[str, Any]:
        """What a checkpoint stores about the loader: the passes, and the gathered states."""
        return {"epoch": self._passes, "loaders": self._states, "loaders_drew": self._drew}

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Restores this rank's state. Raises CheckpointError at another world size."""
        states = progress.get("loaders")
        if states is None:
            started = "with ctx.loader()" if "dataset_length" in progress else "without a loader"
            remedy = "use ctx.loader()" if "dataset_length" in progress else "leave out loader= in ctx.run()"
            raise CheckpointError(
                f"the run started {started}, and its checkpoint has no state for {self._name}: {remedy}"
            )
        if len(states) != self._group.world_size:
            raise CheckpointError(
                f"the checkpoint has the {self._name} states of {len(states)} ranks, and there are now "
                f"{self._group.world_size}: use {len(states)} ranks, or ctx.loader(), which works with any number"
            )
        self._passes, self._drew = progress["epoch"], progress.get("loaders_drew", True)
        self._loader.load_state_dict(states[self._group.rank])
