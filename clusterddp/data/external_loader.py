"""A loader of another library or of the user: any iterable of batches with ``state_dict`` and its inverse.

torchdata's StatefulDataLoader is one. Each rank has its own state, and rank 0's file is to be the whole truth: the
states are gathered before a save, which is therefore one of all ranks at a step that all of them know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist

from clusterddp.data import randomness, stream
from clusterddp.distributed.process_group import ProcessGroup
from clusterddp.errors import CheckpointError
from clusterddp.worker import signals


class StatefulLoader(Protocol):
    """A loader that knows where it is."""

    def __iter__(self) -> Iterator[Any]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class ExternalLoader:
    """What the run needs of a loader, by way of the loader's own state. The interface is ``stream.Loader``'s."""

    #: Whether every rank must take part in a save.
    together = True

    def __init__(self, loader: StatefulLoader, group: ProcessGroup) -> None:
        self._loader, self._group = loader, group
        self._passes = 0
        self._states: list[dict[str, Any]] = []
        #: Whether it took random numbers from the global generators, whose state is not the loader's.
        self._drew = False
        #: Samples per rank and step are the loader's own affair: nothing is ever cut.
        self.share = self.batch_size = 1

    @property
    def doubts(self) -> list[str]:
        """Why a resume may not be exact, as far as has been seen: else a loader with a state is where it was."""
        name = type(self._loader).__name__
        if getattr(self._loader, "num_workers", 0):
            return [f"the random numbers in the workers of {name} are its own"]
        return [f"{name} takes random numbers from the global generators"] if self._drew else []

    def epoch(self, step: int) -> int:
        """How many passes over the loader are behind."""
        del step
        return self._passes

    def ends_epoch(self, step: int) -> bool:
        """Not known before the loader ends."""
        del step
        raise TypeError(f"run.end_of_epoch is not known with {type(self._loader).__name__}: use ctx.loader()")

    def steps_in(self, epochs: float) -> int:
        """By the loader's own length."""
        try:
            return -int(-epochs * len(self._loader))  # type: ignore[arg-type]
        except TypeError:
            raise TypeError(f"{type(self._loader).__name__} has no length: use run.steps(), not run.epochs()") from None

    def batches(self, step: int) -> Iterator[Any]:
        """Pass after pass, from where the loader is."""
        del step
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
            except GeneratorExit:  # the loop is over
                stream.close(iterator)
                raise
            if empty and not found:  # one may be: its state was saved behind the last batch of a pass
                raise ValueError(f"{type(self._loader).__name__} has no batches")
            empty = not found
            self._passes += 1

    def _notice_draws(self, before: randomness.States) -> None:
        self._drew = self._drew or not randomness.equal(before, randomness.states())

    def gather(self) -> None:
        """Brings all ranks' states to rank 0. Collective."""
        states: list[Any] | None = [None] * self._group.world_size if self._group.rank == 0 else None
        dist.gather_object((self._loader.state_dict(), self._drew), states, dst=0)
        if states is not None:
            self._states = [state for state, _ in states]
            self._drew = any(drew for _, drew in states)

    def progress(self, step: int) -> dict[str, Any]:
        """What a checkpoint holds of it: the passes, and the states that were gathered."""
        del step
        return {"epoch": self._passes, "loaders": self._states, "loaders_drew": self._drew}

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Gives each rank its loader's state back. Raises CheckpointError at another world size."""
        states = progress.get("loaders")
        name = type(self._loader).__name__
        if states is None:
            raise CheckpointError(f"the run began with ctx.loader(), and has no state for {name}: give it that again")
        if len(states) != self._group.world_size:
            raise CheckpointError(
                f"the run has the states of {len(states)} ranks' {name}, which {self._group.world_size} ranks cannot "
                f"share: use {len(states)} ranks, or ctx.loader(), which can"
            )
        self._passes, self._drew = progress["epoch"], progress.get("loaders_drew", True)
        self._loader.load_state_dict(states[self._group.rank])


_END = object()


def same_everywhere(decision: bool, device: torch.device) -> bool:
    """Rank 0's decision, on all ranks. Collective."""
    told = torch.tensor([decision], dtype=torch.uint8, device=device)
    dist.broadcast(told, src=0)
    return bool(told.item())
