"""How many items of an epoch a script has trained on, for ``clusterddp.continue_epoch()``."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from clusterddp.reporter import counted, say

Item = TypeVar("Item")


class EpochItems:
    """Counts the items of one epoch after the other. For the thread that trains.

    An item counts once an optimizer has stepped after it was taken, because accumulated gradients are not part of
    any checkpoint. Steps inside ``torch.compile`` are not seen, and then no item counts, so that items are trained on
    twice rather than not at all.
    """

    def __init__(self) -> None:
        #: The iterations that have begun and not ended, oldest first.
        self._loops: list[_Loop] = []

    @property
    def done(self) -> int | None:
        """The items of this epoch that have been trained on, in this attempt or before. None outside of an epoch.

        Also None if two loops take turns, as in ``zip``, because the one that continues ignores the other.
        """
        if len(self._loops) > 1:
            say(
                "continue_epoch: several loops are using it at once, so the next attempt restarts this epoch from its "
                "beginning. Use it once, as in continue_epoch(zip(a, b)), and not for an evaluation"
            )
        return self._loops[0].done if len(self._loops) == 1 else None

    def iterate(self, items: Iterable[Item], skip: int) -> Iterator[Item]:
        """Yields all items but the first ``skip``, and the last one in any case, as scripts divide by their number."""
        loop = _Loop(threading.get_ident())
        self._loops.append(loop)
        hook = register_optimizer_step_post_hook(loop.on_step)
        try:
            rest = iter(items)
            last_skipped = deque(islice(enumerate(rest, 1), skip), maxlen=1)
            loop.taken = loop.done = last_skipped[0][0] if last_skipped else 0
            if skip:
                before = counted(loop.done, "item")
                say(f"continue_epoch: skipping the first {before} of this epoch, which the run used before the stop")
            if loop.taken < skip:
                found = f"expected at least {counted(skip, 'item')}, got {loop.taken}"
                say(f"continue_epoch: {found}. Did the data or the batch size change?")
            for item in rest:
                last_skipped.clear()
                loop.taken += 1
                yield item
            for _, item in last_skipped:
                say("continue_epoch: no item is left, so the last one is trained on again")
                yield item
        finally:
            hook.remove()
            self._loops.remove(loop)


@dataclass(eq=False)
class _Loop:
    """One iteration, by a thread: the items that it has taken, and how many of them were trained on."""

    thread: int
    taken: int = 0
    done: int = 0

    def on_step(self, _optimizer: Any, _args: Any, _options: Any) -> None:
        if torch.compiler.is_compiling():  # this would become part of the compiled step
            return
        if threading.get_ident() == self.thread:
            self.done = self.taken
