"""What ``ctx.run()`` gets instead of ``ctx.loader()``: another loader, with a state or without, or none.

A loader of another library or of the script's own: any iterable of batches with ``state_dict``/``load_state_dict``.

torchdata's StatefulDataLoader is one. Each rank has its own state, while only rank 0 writes checkpoints: all ranks
gather their states before a save, at a step known to all of them. What has not changed since the last save is not sent.

Pass after pass over a loader that clusterddp did not make, which only knows how to be iterated over.

An iterable of batches without a state, such as torch's DataLoader: a resume reads its batches again from the start.

The loader draws from generators of its own, seeded at the beginning of each pass, so that what it draws does not depend
on what the script does between two batches, or did not do before a resume.

Training without a loader: reinforcement learning, simulation, a server of data; each step gets its number.
"""

from __future__ import annotations

import copy
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, Protocol

from clusterddp.checkpoint import transfer
from clusterddp.checkpoint.state import copied
from clusterddp.data import randomness
from clusterddp.data.workers import close
from clusterddp.distributed.process_group import ProcessGroup
from clusterddp.errors import CheckpointError
from clusterddp.reporter import counted, say
from clusterddp.worker import signals

#: In place of a batch: the pass is over; none was fetched.
_END, _NONE = object(), object()


class Passes(ABC):
    """Endless batches of a loader, with the methods of ``Loader`` that follow from them."""

    #: The number of samples per rank and step is the loader's own business: nothing is ever split.
    share = batch_size = 1

    def __init__(self, loader: Any) -> None:
        self._loader, self._name = loader, type(loader).__name__
        #: Completed passes.
        self._passes = 0
        self._iterator: Any = None
        #: The next batch, if the script has asked whether there is one.
        self._ahead: Any = _NONE

    @property
    def given(self) -> Any:
        """The loader itself."""
        return self._loader

    @property
    def workers(self) -> int:
        """The number of processes that read for this rank; 0 if that is unknown."""
        return int(getattr(self._loader, "num_workers", 0))

    @abstractmethod
    def _iter(self) -> Any:
        """The iterator of a pass."""

    @abstractmethod
    def _next(self, iterator: Any, end: Any) -> Any:
        """Its next batch, or ``end``."""

    def epoch(self, _step: int) -> int:
        """The number of completed passes over the loader."""
        return self._passes

    def ends_epoch(self, _step: int) -> bool:
        """Whether the batch that was handed out last is the last one of its pass: fetches the next one.

        Raises RuntimeError before the first batch.
        """
        if self._iterator is None:
            raise RuntimeError(f"run.end_of_epoch is not known before the first batch of {self._name}")
        if self._ahead is _NONE:
            self._ahead = self._next(self._iterator, _END)
        return self._ahead is _END

    def steps_in(self, epochs: float) -> int:
        """The number of steps in so many passes over the loader, by its length."""
        try:
            return -int(-epochs * len(self._loader))
        except TypeError:
            raise TypeError(f"{self._name} has no length: use run.steps() instead of run.epochs()") from None

    def _batches(self) -> Iterator[Any]:
        """Pass after pass, from the loader's current position. Closing the iterator ends its workers."""
        empty = False
        while True:
            found = False
            self._iterator, self._ahead = self._iter(), _NONE
            try:
                while (batch := self._fetched()) is not _END:
                    found = True
                    yield batch
            except GeneratorExit:  # the loop has ended
                close(self._iterator)
                raise
            if empty and not found:  # one empty pass is fine: the state was saved after the last batch of a pass
                raise ValueError(f"{self._name} has no batches, or none when it is iterated over again")
            empty = not found
            self._passes += 1

    def _fetched(self) -> Any:
        batch, self._ahead = self._ahead, _NONE
        return self._next(self._iterator, _END) if batch is _NONE else batch


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
