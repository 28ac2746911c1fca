"""Optimizers and schedulers that the script steps and did not give to ``ctx.run()``: a resume loses their state."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping, ValuesView
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from clusterddp.distributed.wrapping import optimizers, trained_parameters

#: The steps of an attempt in which optimizers are watched. One that is created again in each, as in meta-learning,
#: needs no saving.
_WATCHED = 2


class Forgotten:
    """Watches an attempt's first steps. ``parts``: those of the run. Other steps have no cost."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self._given = set(map(id, _steppable(parts.values())))
        self._optimizers = optimizers(parts)
        modules = [part for part in parts.values() if isinstance(part, torch.nn.Module)]
        self._trained = {parameter for module in modules for parameter in module.parameters()}
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()
        self._before: weakref.WeakSet[Any] | None = None
        self._schedulers: list[weakref.ref[LRScheduler]] = []
        self._steps = 0
        self._handle = register_optimizer_step_post_hook(self._note)

    def _note(self, optimizer: Any, *_: Any) -> None:
        if id(optimizer) not in self._given:
            self._stepped.add(optimizer)

    def end_step(self) -> list[str]:
        """A step of the attempt has ended. The optimizers newly found to be missing, by their classes."""
        self._steps += 1
        if self._steps > _WATCHED:
            return []
        if self._steps == 1:
            self._schedulers = [weakref.ref(one) for one in self._not_given()]  # takes some 20 ms
            self._before, self._stepped = self._stepped, weakref.WeakSet()
            return []
        self._handle.remove()
        before = set(map(id, self._before or ()))
        stepped = [one for one in self._stepped if id(one) in before and trained_parameters(one) & self._trained]
        return sorted(type(one).__name__ for one in stepped)

    def schedulers(self) -> list[str]:
        """The schedulers newly found to be missing, by their classes. Those that were never stepped may be unused."""
        found = [one for ref in self._schedulers if (one := ref()) is not None and _was_stepped(one)]
        self._schedulers = [ref for ref in self._schedulers if ref() not in found]
        return sorted(type(one).__name__ for one in found)

    def _not_given(self) -> Iterator[LRScheduler]:
        own = set(map(id, self._optimizers.values()))
        for one in gc.get_objects():
            if issubclass(type(one), LRScheduler) and id(one) not in self._given and id(one.optimizer) in own:
                yield one


def _steppable(values: Iterable[Any]) -> list[Any]:
    """Objects, and what their attributes, lists and dicts hold, such as the schedulers of a SequentialLR.

    Also what these hold, if they are schedulers, or others with a ``step`` and a state.
    """
    found: dict[int, Any] = {}
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if id(value) in found:
            continue
        found[id(value)] = value
        for name, member in getattr(value, "__dict__", {}).items():
            if isinstance(value, LRScheduler) and name == "optimizer":  # whose state it does not save
                continue
            inner = member.values() if isinstance(member, dict) else member
            for one in inner if isinstance(inner, (list, tuple, ValuesView)) else [member]:
                if callable(getattr(type(one), "step", None)) and hasattr(type(one), "state_dict"):
                    waiting.append(one)
    return list(found.values())


def _was_stepped(scheduler: LRScheduler) -> bool:
    """Whether the script has stepped it: its constructor does so once."""
    return bool(getattr(scheduler, "_step_count", scheduler.last_epoch + 1) > 1)


def explanation(names: list[str]) -> str:
    """The message: what it means, and the remedy."""
    return (
        f"the script steps {', '.join(names)}, which ctx.run() did not receive, so checkpoints lack its state and a "
        "resume begins with a new one. Pass it to ctx.run(), under any name"
    )
