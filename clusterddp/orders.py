"""Orders of samples for ``ctx.loader(dataset, batch_size, order=...)``.

Each is a pure function of (seed, position): a resumed run continues it exactly, on any number of ranks.
"""

from __future__ import annotations

from clusterddp.data.orders import plain
from clusterddp.data.orders.order import Order

__all__ = ["sequential", "shuffled"]


def shuffled(version: int | None = None) -> Order:
    """Every sample once per epoch, each epoch in its own random order: the default of ``ctx.loader``.

    Needs no list of the samples, so that their number does not matter.

    Args:
        version: how the order is computed; 1 is ``torch.randperm``, as in runs that older versions of clusterddp
            started. If None, a resumed run keeps its own, and a new run has the newest.

    Raises ValueError for an unknown version.

    Example: ``loader = ctx.loader(dataset, batch_size=64, order=orders.shuffled())``
    """
    return plain.Shuffled(version)


def sequential() -> Order:
    """Every sample once per epoch, in the dataset's own order.

    Example: ``loader = ctx.loader(dataset, batch_size=64, order=orders.sequential())``
    """
    return plain.Sequential()
