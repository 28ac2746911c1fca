"""How far into its epoch a script's own loop is: the items that it has taken, up to the last step of an optimizer."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from clusterddp.reporter import say

Item = TypeVar("Item")


class EpochItems:
    """Counts the items of one epoch after the other. For the thread that trains.

    An item counts once an optimizer has made a step after it was taken: with gradient accumulation, the gradients of
    those since then are not part of any checkpoint. Steps inside ``torch.compile`` are not seen, and then no item
    counts: it would be trained on twice, rather than not at all.
    """

    def __init__(self) -> None:
        #: The items of this epoch that have been trained on, in this attempt or before; None outside of an epoch.
        self.done: int | None = None
        self._taken = 0
        self._thread = 0

    def iterate(self, items: Iterable[Item], skip: int) -> Iterator[Item]:
        """Yields all items but the first ``skip``."""
        self._thread = threading.get_ident()
        hook = register_optimizer_step_post_hook(self._on_step)
        try:
            rest = iter(items)
            self._taken = self.done = sum(1 for _ in islice(rest, skip))
            if skip:
                say(f"continue_epoch: {self.done} items of this epoch were trained on before the stop, and are skipped")
            if self._taken < skip:
                say(f"continue_epoch: there were to be at least {skip} items: has the data changed, or the batch size?")
            for item in rest:
                self._taken += 1
                yield item
        finally:
            hook.remove()
            self.done = None

    def _on_step(self, _optimizer: Any, _args: Any, _options: Any) -> None:
        if torch.compiler.is_compiling():  # it would become a part of the compiled step
            return
        if self.done is not None and threading.get_ident() == self._thread:
            self.done = self._taken
