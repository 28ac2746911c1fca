"""Settings that a resumed script gives, and that the checkpoint replaces: learning rates, schedules, the batch size.

``submit --change -- --lr 0.5`` starts the script with another learning rate, which it gives to its optimizer. Then
``ctx.run()`` restores the optimizer, with the learning rate of the checkpoint. Each checkpoint records what the script
gave to ``ctx.run()``, so that a resume can name what is new and has no effect. The restored values themselves are no
basis for that: a schedule has changed them since.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from clusterddp.data.loader import Loader
from clusterddp.distributed.wrapping import optimizers
from clusterddp.history.beginnings import NotUsed

_PLAIN = (bool, int, float, str)
_KEY = "given"
_RESTORED = "ctx.run() has restored a checkpoint of a run that began with"
#: What a scheduler derives from its optimizer's learning rate.
_DERIVED = {"base_lrs", "last_epoch", "total_iters", "num_bad_epochs", "cooldown_counter", "best", "verbose"}


class GivenValues:
    """What the script gave to ``ctx.run()``. Made before the restore. ``parts`` and ``loader``: those of the run.

    ``files``: those of ``init_from``.
    """

    def __init__(self, parts: Mapping[str, Any], loader: Any, files: str | None) -> None:
        self._now: dict[str, Any] = dict(_values(parts))
        self._global_batch: int | None = None
        if isinstance(loader, Loader):
            self._now["loader.batch_size"], self._global_batch = loader.batch_size, loader.global_batch
        if files is not None:
            self._now["init_from"] = files

    def progress(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {_KEY: self._now}

    def unused(self, progress: Mapping[str, Any]) -> Iterator[NotUsed]:
        """An event for each value that is not that of the checkpoint's attempt."""
        before = progress[_KEY]
        for name, value in self._now.items():
            if name == "loader.batch_size" and self._global_batch == progress["global_batch"]:
                continue  # as on another number of ranks that share the same global batch
            if name in before and before[name] != value:
                yield NotUsed(what=name, given=value, used=before[name], because=_RESTORED)


def _values(parts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, part in optimizers(parts).items():
        groups = getattr(part, "param_groups", ())
        for number, group in enumerate(groups):
            path = f"{name}.param_groups[{number}]" if len(groups) > 1 else name
            for key, value in group.items():
                if key not in ("params", "initial_lr"):
                    # A scheduler with a warmup has already changed lr.
                    yield from _plain(f"{path}.{key}", group.get("initial_lr", value) if key == "lr" else value)
    for name, part in parts.items():
        if isinstance(part, (LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)):
            for key, value in vars(part).items():
                if not key.startswith("_") and key not in _DERIVED:
                    yield from _plain(f"{name}.{key}", value)


def _plain(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A setting, if JSON can represent it."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, (list, tuple)) and all(type(entry) in _PLAIN for entry in value):
        yield name, list(value)
    elif type(value) in _PLAIN and value == value:
        yield name, value
