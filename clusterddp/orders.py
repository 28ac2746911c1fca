"""Orders of samples for ``ctx.loader(dataset, batch_size, order=...)``.

Each is a pure function of (seed, position): a resumed run continues it exactly, on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from clusterddp.data import sample_orders
from clusterddp.data import sample_orders as by_weight
from clusterddp.data.mixture import Mixture, Weights
from clusterddp.data.sample_order import Order
from clusterddp.data.sample_orders import Bucketed, ByShard

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["bucketed", "by_shard", "class_weights", "mixture", "sequential", "shuffled", "weighted"]


def shuffled(version: int | None = None) -> Order:
    """Every sample once per epoch, each epoch in its own random order: the default of ``ctx.loader``.

    Needs no list of the samples, so that their number does not matter.

    Args:
        version: how the order is computed; 1 is ``torch.randperm``, as in runs that older versions of clusterddp
            started. If None, a resumed run keeps its own, and a new run has the newest.

    Raises ValueError for an unknown version.

    Example: ``loader = ctx.loader(dataset, batch_size=64, order=orders.shuffled())``
    """
    return sample_orders.Shuffled(version)


def sequential() -> Order:
    """Every sample once per epoch, in the dataset's own order.

    Example: ``loader = ctx.loader(dataset, batch_size=64, order=orders.sequential())``
    """
    return sample_orders.Sequential()


def weighted(weights: Any, labels: Any = None, *, num_samples: int | None = None) -> Order:
    """Draws with replacement, each sample with a probability in proportion to its weight.

    The same as torch's ``WeightedRandomSampler(weights, num_samples)``. Weights and labels may be memory-mapped: of
    10^9 samples only the sums over blocks of 128 are kept, and all weights are read once. For draws without replacement
    give ``WeightedRandomSampler(replacement=False)`` itself to ``ctx.loader(sampler=...)``: it makes a list of the
    samples in each epoch.

    Args:
        weights: a weight per sample, or with ``labels`` per class, as a list, array or tensor; need not sum to 1.
        labels: the class of each sample, from 0.
        num_samples: draws per epoch; the number of samples if None.

    Raises TypeError and ValueError for what are no weights or labels; ``ctx.loader`` raises ValueError if their number
    is not that of the samples.

    Example: ``order = orders.weighted(orders.class_weights(labels), labels)``
    """
    return by_weight.Weighted(weights, labels, num_samples)


def class_weights(labels: Any) -> npt.NDArray[np.float64]:
    """A weight per class, with which ``weighted`` draws all classes equally often.

    Args:
        labels: the class of each sample, from 0, as a list, array or tensor.

    Returns the number of samples divided by that of the classes and that of the class's samples; 0 for a class without
    samples. The mean over the samples is 1.

    Raises TypeError and ValueError for anything but numbers from 0.

    Example: ``criterion = CrossEntropyLoss(torch.from_numpy(orders.class_weights(labels)).float())``
    """
    return by_weight.class_weights(labels)


def bucketed(lengths: Any, *, buckets: int = 50) -> Order:
    """Every sample once per epoch, in global batches of similar length, in a random order.

    Saves padding. The samples are sorted by length and cut into buckets; batches are mixed within them, in each epoch
    in another way.

    Args:
        lengths: the length of each sample, as a list, array or tensor.
        buckets: how many there are; more save more padding and mix less. Each has 4 global batches at least.

    Raises TypeError and ValueError for what are no lengths; ``ctx.loader`` raises ValueError if their number is not
    that of the samples.

    Example: ``order = orders.bucketed([len(text) for text in texts])``
    """
    return Bucketed(lengths, buckets)


def by_shard(window: int = 10_000) -> Order:
    """Every sample once per epoch, nearly in the sequence of the files: for ``clusterddp.streams``.

    In each epoch the shards come in another random order, and the samples are shuffled within windows of that row. So
    the disk reads a window of neighbouring samples at a time, and then never again in this epoch.

    Args:
        window: samples that are shuffled together; more mix more, over more shards.

    Raises ValueError for a wrong window; ``ctx.loader`` raises TypeError for a dataset without ``shard_lengths``, the
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
    """Samples of several datasets, in proportion to their weights, without end.

    Each dataset is passed through again and again, so that all of its samples come equally often. ``ctx.loader`` is
    given a dict or a list of datasets, or a ConcatDataset.

    Args:
        weights: of each dataset: by name for a dict of datasets, else in their order; need not sum to 1. Shares are
            rounded to multiples of 1/100,000.
        changes: the weights from given steps on, such as ``{10_000: {"web": 1, "books": 3}}``; batches that
            ``run.skip`` leaves out count, too. A resumed run may have other changes in steps to come.
        shuffle: whether each pass through a dataset has its own random order.
        num_samples: samples per epoch, for ``run.epochs`` and the like; the samples of all datasets if None.

    Raises ValueError for steps that are none; ``ctx.loader`` raises ValueError and TypeError if the weights do not fit
    the datasets.

    Example: ``loader = ctx.loader({"web": web, "books": books}, 64, order=orders.mixture({"web": 3, "books": 1}))``
    """
    return Mixture(weights, changes or {}, shuffle, num_samples)
