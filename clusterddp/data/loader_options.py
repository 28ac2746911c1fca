"""What ``ctx.loader`` and ``ctx.eval_loader`` accept: datasets, batch sizes and the options of torch's DataLoader."""

from __future__ import annotations

import difflib
import inspect
import operator
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

#: Arguments that are True or False. None is the default of ``shuffle``.
_SWITCHES = ("shuffle", "drop_last", "to_device", "pin_memory", "persistent_workers", "in_order")


def check_switches(**given: Any) -> None:
    """Raises TypeError where a switch is neither True nor False: text and numbers would count as one of them."""
    for name in _SWITCHES:
        value = given.get(name, False)
        if not isinstance(value, bool) and not (name == "shuffle" and value is None):
            raise TypeError(f"{name} is {value!r}: expected True or False")


def checked(dataset: Dataset[Any], batch_size: int, options: dict[str, Any]) -> tuple[int, int]:
    """The length of the dataset and the batch size. Raises TypeError or ValueError."""
    check_switches(**options)
    known = inspect.signature(DataLoader.__init__).parameters.keys() | {"order"}
    for name in sorted(options.keys() - known):
        nearest = "".join(f"; did you mean {near}?" for near in difflib.get_close_matches(name, known, 1))
        raise TypeError(f"{name!r} is not an option of the loader or of torch's DataLoader{nearest}")
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"{type(dataset).__name__} has no length and no index, so a run cannot resume in it at once: use a dataset "
            "with __len__ and __getitem__, such as those of clusterddp.streams, or give ctx.run() a loader of "
            "your own, such as torchdata's StatefulDataLoader, which it resumes by its state"
        )
    try:
        number = operator.index(batch_size)
    except TypeError:
        raise TypeError(f"batch_size is {batch_size!r}: expected an integer") from None
    if number < 1:
        raise ValueError(f"batch_size is {number}: expected the number of samples per rank and step, 1 or more")
    if not len(dataset):
        raise ValueError(f"the dataset ({type(dataset).__name__}) has no samples")
    return len(dataset), number
