"""Orders of samples for ``ctx.loader(dataset, batch_size, order=...)``.

Each is a pure function of (seed, position), so a resumed run continues it exactly, on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from clusterddp.data import sample_order
from clusterddp.data.mixture import Mixture, Weights
from clusterddp.data.sample_order import Bucketed, ByShard, Order

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["bucketed", "by_shard", "class_weights", "mixture", "sequential", "shuffled", "weighted"]


def shuffled(version: int | None = None) -> Order:
    """Every sample once per epoch, each epoch in its own random order: the default of ``ctx.loader``.

    Needs no list of the samples, so their number does not matter.

    Args:
        version: how the order is computed. 1 is ``torch.randperm``, as in runs that older versions of clusterddp
            started. If None, a resumed run keeps its own, and a new run has the newest.

    Raises ValueError for an unknown version.

    Example: ``loader = ctx.loader(dataset, batch_size=64, order=orders.shuffled())``
    """
    return sample_order.Shuffled(version)


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


def bucketed(lengths: Any, *, buckets: int = 50) -> Order:
    """Every sample once per epoch, in global batches of similar length, in a random order.

    Saves padding. The samples are sorted by length and cut into buckets. They are shuffled within the buckets,
    differently in each epoch.

    Args:
        lengths: the length of each sample, as a list, array or tensor.
        buckets: the maximum number of buckets. More save more padding and mix less. There are fewer if a bucket would
            have fewer than 4 global batches.

    Raises TypeError and ValueError for invalid lengths. ``ctx.loader`` raises ValueError if their number is not that
    of the samples.

    Example: ``order = orders.bucketed([len(text) for text in texts])``
    """
    return Bucketed(lengths, buckets)


def by_shard(window: int = 10_000) -> Order:
    """Every sample once per epoch, in shuffled files and shuffled windows, for ``clusterddp.streams``.

    In each epoch the shards come in a new random order, and the samples are shuffled within windows of it. The disk
    therefore reads a window of neighbouring samples at a time, and only once per epoch.

    Args:
        window: the number of samples that are shuffled together. More mix more, over more shards.

    Raises ValueError for a wrong window. ``ctx.loader`` raises TypeError for a dataset without ``shard_lengths``, the
    number of samples in each shard.

    Example: ``loader = ctx.loader(streams.JsonLines("data/*.jsonl"), batch_size=64, order=orders.by_shard())``
    """
    return ByShard(window)


def mixture(
    weights: Weights,
    *,
    changes: Mapping[int, Weights] | None = None,
    shuffle: bool = True,
    num_samples: int | None = None,
) -> Order:
    """Samples of several datasets, in proportion to their weights, in an endless sequence.

    Each dataset is passed through repeatedly, so all of its samples come equally often. Pass a dict or a list of
    datasets, or a ConcatDataset, to ``ctx.loader``.

    Args:
        weights: one per dataset: by name for a dict of datasets, else in order. They need not sum to 1. Shares are
            rounded to multiples of 1/100,000.
        changes: the weights from given steps on, such as ``{10_000: {"web": 1, "books": 3}}``. Batches that
            ``run.skip`` leaves out also count. A resumed run may have different changes in the steps to come.
        shuffle: whether each pass through a dataset has its own random order.
        num_samples: samples per epoch, for ``run.epochs`` and the like. None: those of all datasets.

    Raises ValueError for invalid steps. ``ctx.loader`` raises ValueError and TypeError if the weights do not fit
    the datasets.

    Example: ``loader = ctx.loader({"web": web, "books": books}, 64, order=orders.mixture({"web": 3, "books": 1}))``
    """
    return Mixture(weights, changes or {}, shuffle, num_samples)
