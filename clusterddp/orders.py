"""Orders of samples for ``ctx.loader(dataset, batch_size, order=...)``.

Each is a pure function of (seed, position), so a resumed run continues it exactly, on any number of ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterddp.data import sample_order
from clusterddp.data.sample_order import Order

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["class_weights", "sequential", "shuffled", "weighted"]


def shuffled() -> Order:
    """Every sample once per epoch, each epoch in its own random order: the default of ``ctx.loader``.

    Needs no list of the samples, so their number does not matter.

    Example: ``loader = ctx.loader(dataset, batch_size=64, order=orders.shuffled())``
    """
    return sample_order.Shuffled()


def sequential() -> Order:
    """Every sample once per epoch, in the dataset's own order.

    Example: ``loader = ctx.loader(dataset, batch_size=64, order=orders.sequential())``
    """
    return sample_order.Sequential()


def weighted(weights: Any, labels: Any = None, *, num_samples: int | None = None) -> Order:
    """Draws with replacement, each sample with a probability in proportion to its weight.

    The same as torch's ``WeightedRandomSampler(weights, num_samples)``. Weights and labels may be memory-mapped: of
    10^9 samples only the sums over blocks of 128 are kept, and all weights are read once. For draws without
    replacement, pass ``WeightedRandomSampler(replacement=False)`` to ``ctx.loader(sampler=...)``, which makes a list of
    the samples in each epoch.

    Args:
        weights: a weight per sample, or with ``labels`` per class, as a list, array or tensor. They need not sum to 1.
        labels: the class of each sample, from 0.
        num_samples: draws per epoch. None: the number of samples.

    Raises TypeError and ValueError for invalid weights or labels. ``ctx.loader`` raises ValueError if their number is
    not that of the samples.

    Example: ``order = orders.weighted(orders.class_weights(labels), labels)``
    """
    return sample_order.Weighted(weights, labels, num_samples)


def class_weights(labels: Any) -> npt.NDArray[np.float64]:
    """A weight per class, with which ``weighted`` draws all classes equally often.

    Args:
        labels: the class of each sample, from 0, as a list, array or tensor.

    Returns for each class n / (k * m), where n is the number of samples, k that of the classes with samples, and m that
    of the class's samples. A class without samples gets 0. The mean over the samples is 1.

    Raises TypeError and ValueError for anything but numbers from 0.

    Example: ``criterion = CrossEntropyLoss(torch.from_numpy(orders.class_weights(labels)).float())``
    """
    return sample_order.class_weights(labels)
