"""Loaders other than ``ctx.loader()`` in ``ctx.run()``: with a state, without a state, or no loader.

``ExternalLoader`` is any iterable of batches with ``state_dict`` and ``load_state_dict``, such as torchdata's
StatefulDataLoader. Each rank has its own state, but only rank 0 writes checkpoints. All ranks therefore gather their
states before a save, at a step known to all of them. States that have not changed since the last save are not sent.

``ReplayedLoader`` is an iterable of batches without a state, such as torch's DataLoader. A resume reads its batches
again from the start.

Both make passes over the loader without end. The loader draws from separate generators, seeded at the beginning of each
pass, so that its draws do not depend on what the script does between two batches, or did not do before a resume.

``NoLoader`` is for reinforcement learning, simulation or a data server: each step gets its number.
"""

from __future__ import annotations

import copy
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, NoReturn, Protocol

from torch.utils.data import DataLoader

from clusterddp.checkpoint import transfer
from clusterddp.checkpoint.state_copies import copied
from clusterddp.data import randomness
from clusterddp.data.workers import close
from clusterddp.distributed.process_group import ProcessGroup
from clusterddp.errors import CheckpointMismatch
from clusterddp.reporter import counted, say
from clusterddp.worker import signals

#: In place of a batch: the pass is over, or no batch was fetched.
_END, _NONE = object(), object()


class Passes(ABC):
    """Endless batches of a loader, with the methods of ``Loader`` that follow from them."""

    #: The loader decides the number of samples per rank and step, so batches are never split.
    share = batch_size = 1

    def __init__(self, loader: Any, group: ProcessGroup) -> None:
        self._loader, self._name, self._group = loader, type(loader).__name__, group
        #: Whether the script acts at the ends of epochs. Passes must then have as many batches on every rank.
        self._counts_epochs = False
        #: The batches of this attempt so far, and its passes.
        self._yielded = self._ended = 0
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
        """The number of processes that read for this rank. 0 if that is unknown."""
        return int(getattr(self._loader, "num_workers", 0))

    @abstractmethod
    def _iter(self) -> Any:
        """The iterator of a pass."""

    @abstractmethod
    def _next(self, iterator: Any, end: Any) -> Any:
        """Its next batch, or ``end``."""

    def _set_epoch(self) -> None:
        """Passes the number of the pass to the loader and to what orders its samples, before its iterator is made."""
        for part in self._parts():
            if hasattr(part, "set_epoch"):
                part.set_epoch(self._passes)

    def _parts(self) -> Iterator[Any]:
        """The loader, and what orders its samples."""
        loader = self._loader
        yield loader
        for part in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
            yield part
            yield getattr(part, "sampler", None)
        yield getattr(loader, "dataset", None)

    def epoch(self, _step: int) -> int:
        """The number of completed passes over the loader."""
        return self._passes

    def ends_epoch(self, _step: int) -> bool:
        """Whether the last yielded batch is the last one of its pass, which it finds by fetching the next one.

        Raises RuntimeError before the first batch.
        """
        if self._iterator is None:
            raise RuntimeError(f"run.end_of_epoch is unknown before the first batch of {self._name}")
        if self._ahead is _NONE:
            self._ahead = self._next(self._iterator, _END)
        return self._ahead is _END

    def steps_in(self, epochs: float) -> int:
        """The number of steps in this many passes over the loader, from its length."""
        try:
            return -int(-epochs * len(self._loader))
        except TypeError:
            raise TypeError(f"{self._name} has no length. Use run.steps() instead of run.epochs()") from None

    def _batches(self) -> Generator[Any]:
        """Pass after pass, from the loader's current position. Closing the iterator ends its workers."""
        empty = False
        while True:
            found = False
            self._iterator, self._ahead = self._iter(), _NONE
            try:
                while (batch := self._fetched()) is not _END:
                    found = True
                    self._yielded += 1
                    yield batch
            except GeneratorExit:  # the loop has ended
                close(self._iterator)
                raise
            if empty and not found:  # one empty pass is right if the state was saved after the last batch of a pass
                raise ValueError(
                    f"{self._name} has no batches, or none in its second pass. Expected an iterable whose __iter__ "
                    "begins a new pass"
                )
            self._compare_pass()
            empty = not found
            self._passes += 1

    def count_epochs(self) -> None:
        """From now on, passes that differ between ranks are an error, and lengths that differ at once: ValueError."""
        if self._counts_epochs or self._group.world_size == 1:
            return
        self._counts_epochs = True
        try:
            length = len(self._loader)
        except TypeError:
            return  # the end of the first pass shows it
        self._compare("passes/length", length)

    def _compare_pass(self) -> None:
        """A pass has ended. Raises ValueError if it ends after a different number of batches on another rank, and the
        script acts at the ends of epochs: it would evaluate, or step its scheduler, on some ranks only.
        """
        if self._group.world_size == 1:
            return
        self._compare(f"passes/{self._ended}", self._yielded)
        self._ended += 1

    def _compare(self, key: str, batches: int) -> None:
        """The first rank to come here records its number, with which the others compare theirs."""
        own = f"{batches} {self._group.rank}"
        first, rank = self._group.store.compare_set(key, "", own).decode().split()
        if int(first) != batches and self._counts_epochs:
            raise ValueError(
                f"the ranks' passes over {self._name} differ: {counted(int(first), 'batch', 'batches')} on rank "
                f"{rank}, but {batches} on rank {self._group.rank}. An epoch must have the same number of batches on "
                "every rank, because all ranks evaluate and step schedulers together. Give every rank as many batches, "
                "or count steps instead of epochs, as in run.every(steps=500)"
            )

    def _fetched(self) -> Any:
        batch, self._ahead = self._ahead, _NONE
        return self._next(self._iterator, _END) if batch is _NONE else batch


#: A loader's method that takes over the states of a different number of ranks.
SPLIT = "load_state_dicts"


class StatefulLoader(Protocol):
    """A loader of batches that can save and restore its position.

    To continue on a different number of ranks, it also needs a method ``load_state_dicts(states, rank, world_size)``,
    which gets the states of all ranks.
    """

    def __iter__(self) -> Iterator[Any]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class ExternalLoader(Passes):
    """A StatefulLoader with the methods of ``Loader``, resumed by its own state rather than by the step."""

    per_rank_state = True

    def __init__(self, loader: StatefulLoader, group: ProcessGroup) -> None:
        super().__init__(loader, group)
        #: Of all ranks, on rank 0: their loaders' states, and their passes, which may differ in length.
        self._states: list[dict[str, Any]] = []
        self._all_passes: list[int] = []
        self._gathering = transfer.Gathering(group.control_device)
        #: Whether the loader has drawn from the global generators, whose state is not the loader's.
        self._drew = False
        #: The state before a fetched batch that is not yielded yet.
        self._before: dict[str, Any] | None = None

    @property
    def inexact(self) -> list[str]:
        """The reasons, known so far, why a resume may not be exact."""
        if getattr(self._loader, "num_workers", 0):
            return [f"the workers of {self._name} draw their own random numbers"]
        return [f"{self._name} draws from the global random generators"] if self._drew else []

    def batches(self, _step: int) -> Iterator[Any]:
        """Pass after pass, from the loader's current position."""
        if self._iterator is not None:  # an earlier loop has ended, and with it the iterator's workers
            state = copy.deepcopy(self._loader.state_dict()) if self._before is None else self._before
            self._loader.load_state_dict(state)
            self._before = None
        return self._batches()

    def _iter(self) -> Any:
        before = randomness.states()
        self._set_epoch()  # Hugging Face's datasets use a state only in the pass in which it was saved
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
        """As with any loader. The state to save stays the one before the next batch was fetched."""
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
        """The loader's entries in a checkpoint: the passes, and the gathered states."""
        return {
            "epoch": self._passes,
            "loaders": self._states,
            "loaders_passes": self._all_passes,
            "loaders_drew": self._drew,
        }

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Restores this rank's state. Raises CheckpointError if the world size changed, unless the loader supports
        that."""
        states = progress.get("loaders")
        if states is None:
            raise CheckpointMismatch(f"the checkpoint has no state for {self._name}. {_started(progress)}")
        rank, ranks = self._group.rank, self._group.world_size
        self._passes, self._drew = progress["epoch"], progress["loaders_drew"]
        if len(states) == ranks:
            self._passes = progress["loaders_passes"][rank]
            self._loader.load_state_dict(copied({"state": states[rank]})["state"])
        elif hasattr(self._loader, SPLIT):
            getattr(self._loader, SPLIT)(copied({"states": states})["states"], rank, ranks)
        else:
            before = counted(len(states), "rank")
            raise CheckpointMismatch(
                f"the checkpoint has the {self._name} states of {before}, but the world size is now {ranks}. Use "
                f"{before}, give the loader a method {SPLIT}(states, rank, world_size), or start a new run with "
                "ctx.loader(), which works with any number of ranks"
            )


def _started(progress: Mapping[str, Any]) -> str:
    if "dataset_length" in progress:
        return "Use ctx.loader(), with which the run started"
    if "loaders" in progress:
        return "Pass the loader that the run started with, which had no state_dict()"
    return "Leave out loader= in ctx.run(), because the run started without a loader"


_BETTER = "ctx.loader() resumes without reading"


class ReplayedLoader(Passes):
    """Any iterable of this rank's batches, with the methods of ``Loader``.

    Attributes:
        taken: how many batches it has yielded.
    """

    per_rank_state = False

    def __init__(self, loader: Any, group: ProcessGroup, seed: int) -> None:
        super().__init__(loader, group)
        self._seed = seed
        self.taken = 0
        self._stream: Generator[Any] | None = None
        self._generators = randomness.states()
        if group.rank == 0:
            say(f"{self._name} has no state_dict(), so a resume reads its batches again from the start. {_BETTER}")

    @property
    def inexact(self) -> list[str]:
        """A resume is exact only if it yields the same batches again, which is unknown."""
        return [f"{self._name} has no state, so a resume is exact only if it repeats its batches"]

    def batches(self, step: int) -> Iterator[Any]:
        """From the current position, which may be before that of ``step``. The loader stays open for the next loop."""
        if self._stream is None or self.taken > step:
            if self._stream is not None:
                self._stream.close()
                if isinstance(self._loader, DataLoader):
                    self._loader._iterator = None  # it would use its persistent workers, which are closed
            self._stream, self.taken, self._passes = self._batches(), 0, 0
        return self._counted(self._stream)

    def _counted(self, stream: Iterator[Any]) -> Iterator[Any]:
        for batch in stream:
            self.taken += 1
            yield batch

    def _iter(self) -> Any:
        self._set_epoch()
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

    def replay(self, count: int, iterator: Iterator[Any], at_batch: Callable[[], None]) -> None:
        """Takes batches until there were ``count``. Rank 0 reports how long that took. ``at_batch``: before each
        one."""
        again, started = count - self.taken, time.monotonic()
        while self.taken < count:
            at_batch()
            next(iterator)
        if again > 0 and self._group.rank == 0:
            say(
                f"{self._name} has no state_dict(). Reading its first {counted(again, 'batch', 'batches')} again took "
                f"{time.monotonic() - started:.1f} s. {_BETTER}. torchdata's StatefulDataLoader saves its position"
            )

    def gather(self) -> None:
        """Has no effect, because the position follows from the step."""

    def progress(self, _step: int) -> dict[str, Any]:
        """The loader's entries in a checkpoint."""
        return {"epoch": self._passes, "loaders": None}

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Raises CheckpointError if the run started with a different kind of loader or number of ranks."""
        if progress.get("loaders", self) is not None:
            raise CheckpointMismatch(
                f"ctx.run() received {self._name}, which has no state_dict(), but the run started with a "
                "different kind of loader. Pass the loader that the run started with, or start a new run"
            )
        if (ranks := progress["world_size"]) != self._group.world_size:
            before = counted(ranks, "rank")
            raise CheckpointMismatch(
                f"the run read its batches from {self._name} on {before}, but the world size is now "
                f"{self._group.world_size}. Use {before}, or start a new run with ctx.loader(), which works with any "
                "number of ranks"
            )


class NoLoader:
    """The methods of ``Loader`` for a run without one."""

    per_rank_state = False
    #: There are no batches to split.
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
            f"run.{name} is not available without a loader. Give ctx.run() a loader=, or count steps with run.step and "
            "run.steps()"
        )

    def batches(self, step: int) -> Iterator[int]:
        """The steps' numbers, from ``step`` on."""
        yield from itertools.count(step)

    def gather(self) -> None:
        """Has no effect."""

    def progress(self, _step: int) -> dict[str, Any]:
        """An empty entry in a checkpoint."""
        return {}

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Raises CheckpointError if the run started with a loader."""
        if "dataset_length" in progress or "loaders" in progress:
            raise CheckpointMismatch(
                "the run started with a loader, but ctx.run() received no loader. Pass it again, or start a new run"
            )
