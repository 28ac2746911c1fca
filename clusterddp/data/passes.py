"""Pass after pass over a loader that clusterddp did not make, which only knows how to be iterated over."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from clusterddp.data.workers import close

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
