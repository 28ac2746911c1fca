"""A loader of another library or of the script's own: any iterable of batches with ``state_dict``/``load_state_dict``.

torchdata's StatefulDataLoader is one. Each rank has its own state, while only rank 0 writes checkpoints: all ranks
gather their states before a save, at a step known to all of them. What has not changed since the last save is not sent.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from clusterddp.checkpoint import transfer
from clusterddp.checkpoint.state import copied
from clusterddp.data import randomness
from clusterddp.data.passes import Passes
from clusterddp.distributed.process_group import ProcessGroup
from clusterddp.errors import CheckpointError
from clusterddp.worker import signals

#: Of a loader: takes over the states of another number of ranks.
SPLIT = "load_state_dicts"


class StatefulLoader(Protocol):
    """A loader of batches that can save and restore its position.

    To continue on another number of ranks, it also needs a method ``load_state_dicts(states, rank, world_size)``, which
    gets the states of all ranks.
    """

    def __iter__(self) -> Iterator[Any]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class ExternalLoader(Passes):
    """A StatefulLoader with the methods of ``Loader``, resumed by its own state rather than by the step."""

    per_rank_state = True

    def __init__(self, loader: StatefulLoader, group: ProcessGroup) -> None:
        super().__init__(loader)
        self._group = group
        #: Of all ranks, on rank 0: their loaders' states, and their passes, which may differ in length.
        self._states: list[dict[str, Any]] = []
        self._all_passes: list[int] = []
        self._gathering = transfer.Gathering(group.control_device)
        #: Whether the loader has drawn from the global generators, whose state is not the loader's.
        self._drew = False
        #: The state before a batch was fetched that is not handed out yet.
        self._before: dict[str, Any] | None = None

    @property
    def inexact(self) -> list[str]:
        """Reasons why a resume may not be exact, as far as is known by now."""
        if getattr(self._loader, "num_workers", 0):
            return [f"the workers of {self._name} draw their own random numbers"]
        return [f"{self._name} draws from the global random generators"] if self._drew else []

    def batches(self, _step: int) -> Iterator[Any]:
        """Pass after pass, from the loader's current position."""
        if self._before is not None:  # an earlier loop ended with a batch that was not handed out
            self._loader.load_state_dict(self._before)
            self._before = None
        return self._batches()

    def _iter(self) -> Any:
        before = randomness.states()
        if hasattr(self._loader, "set_epoch"):  # Hugging Face's: the state applies to the pass in which it was saved
            self._loader.set_epoch(self._passes)
        with signals.blocked(self._loader):
            iterator = iter(self._loader)
        self._notice_draws(before)
        return iterator

    def _next(self, iterator: Any, end: Any) -> Any:
        with randomness.preserved() as before:
            batch = next(iterator, end)
            self._notice_draws(before)
        return batch

    def _fetched(self) -> Any:
        self._before = None
        return super()._fetched()

    def ends_epoch(self, step: int) -> bool:
        """As with any loader; the state to be saved stays the one before the next batch was fetched."""
        if self._before is None:
            self._before = copy.deepcopy(self._loader.state_dict())
        return super().ends_epoch(step)

    def _notice_draws(self, before: randomness.States) -> None:
        self._drew = self._drew or not randomness.equal(before, randomness.states())

    def gather(self) -> None:
        """Brings the states of all ranks to rank 0. Collective."""
        state = self._loader.state_dict() if self._before is None else self._before
        told = {"state": state, "passes": self._passes, "drew": self._drew}
        if (all_told := self._gathering(told)) is not None:
            self._states = [told["state"] for told in all_told]
            self._all_passes = [told["passes"] for told in all_told]
            self._drew = any(told["drew"] for told in all_told)

    def progress(self, _step: int) -> dict[str, Any]:
        """What a checkpoint stores about the loader: the passes, and the gathered states."""
        return {
            "epoch": self._passes,
            "loaders": self._states,
            "loaders_passes": self._all_passes,
            "loaders_drew": self._drew,
        }

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Restores this rank's state. Raises CheckpointError at another world size, unless the loader supports that."""
        states = progress.get("loaders")
        if states is None:
            raise CheckpointError(f"{_started(progress)}, and its checkpoint has no state for {self._name}")
        rank, ranks = self._group.rank, self._group.world_size
        self._passes, self._drew = progress["epoch"], progress.get("loaders_drew", True)
        if len(states) == ranks:
            self._passes = (progress.get("loaders_passes") or [self._passes] * ranks)[rank]
            self._loader.load_state_dict(copied({"state": states[rank]})["state"])
        elif hasattr(self._loader, SPLIT):
            getattr(self._loader, SPLIT)(copied({"states": states})["states"], rank, ranks)
        else:
            raise CheckpointError(
                f"the checkpoint has the {self._name} states of {len(states)} ranks, and there are now {ranks}: use "
                f"{len(states)} ranks, give the loader a method {SPLIT}(states, rank, world_size), or use "
                "ctx.loader(), which works with any number"
            )


def _started(progress: Mapping[str, Any]) -> str:
    if "dataset_length" in progress:
        return "use ctx.loader(): the run started with it"
    if "loaders" in progress:
        return "pass the loader that the run started with: it had no state_dict()"
    return "leave out loader= in ctx.run(): the run started without a loader"
