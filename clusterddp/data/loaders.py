"""The methods of ``ctx`` that make loaders: the samples of this rank, for training and for evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.data import Dataset

from clusterddp.data.loader import EvalLoader, Loader, check_switches
from clusterddp.data.sample_order import Order
from clusterddp.data.samplers import chosen


class Loaders:
    """The part of ``Context`` that makes loaders, documented there."""

    rank: int
    world_size: int
    seed: int
    device: torch.device
    #: Of the job definition: samples per step over all ranks.
    _global_batch: int | None

    def _stop_in_evaluation(self) -> None:
        """Between two batches of an evaluation."""
        raise NotImplementedError

    def _evaluating(self) -> AbstractContextManager[None]:
        """Around an evaluation."""
        raise NotImplementedError

    def loader(
        self,
        dataset: Dataset[Any] | Sequence[Any] | Mapping[str, Any],
        batch_size: int,
        *,
        shuffle: bool | None = None,
        order: Order | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        drop_last: bool = False,
        to_device: bool = True,
        **options: Any,
    ) -> Loader:
        """The training samples of this rank, for ``ctx.run``, in an order that a resumed run continues exactly.

        Each sample is read with its own seed, so that random augmentation does not depend on the number of workers.

        Args:
            dataset: with ``__len__`` and ``__getitem__``. With ``order=orders.mixture(...)`` a list or dict of these.
            batch_size: samples per rank and step. If the job sets ``global_batch``, or the number of ranks changed, a
                rank's share of a step is the global batch divided by the ranks, and ``batch_size`` the most that
                ``run.micro`` yields at once.
            shuffle: whether each epoch has its own random order. True if neither it nor an order is given.
            order: one of ``clusterddp.orders``, instead of ``shuffle``.
            sampler: a torch Sampler of all samples, instead of an order, that draws an epoch again in the same way:
                from the global generators, which are seeded, or by ``set_epoch``.
            batch_sampler: the same for batches of ``batch_size`` samples. A step takes one per rank.
            drop_last: ends each epoch at a whole global batch, and leaves out the rest of its samples. Without it, the
                last step of an epoch is filled from the next epoch.
            to_device: on a GPU, yields batches whose tensors are on this rank's device, copied on a separate stream,
                with workers a step ahead. ``.to(ctx.device)`` then has no effect. Only tensors in tuples, lists and
                dicts are copied. Pass False for batches that the script reads on the CPU.
            options: of torch's DataLoader, such as ``num_workers``. On a GPU, ``pin_memory`` is on unless they set it.
                A dataset without workers may return tensors on the device.

        Raises TypeError for a dataset without a length, for unknown options, switches that are neither True nor False,
        two orders and a DistributedSampler.
        ValueError for an empty dataset, an order that does not fit it, a sampler with hidden state, and a global
        batch that the ranks cannot share evenly.
        """
        check_switches(shuffle=shuffle, to_device=to_device)
        return Loader(
            dataset,
            batch_size,
            order=chosen(
                dataset, batch_size, shuffle=shuffle, order=order, sampler=sampler, batch_sampler=batch_sampler
            ),
            drop_last=drop_last,
            seed=self.seed,
            rank=self.rank,
            world_size=self.world_size,
            global_batch=self._global_batch,
            device=self.device if to_device else None,
            **self._pinning(options),
        )

    def eval_loader(
        self, dataset: Dataset[Any], batch_size: int, *, to_device: bool = True, **options: Any
    ) -> EvalLoader:
        """The evaluation samples of this rank: each sample once over all ranks, in order, without padding.

        This rank has samples rank, rank + world_size, and so on. All ranks iterate over it at the same time, because
        the run can stop between its batches, as at ``stop_point``.

        Args:
            dataset: with ``__len__`` and ``__getitem__``.
            batch_size: samples per rank and batch. The last batch may be smaller.
            to_device: on a GPU, yields batches on this rank's device, as ``loader`` does.
            options: of torch's DataLoader, as for ``loader``.

        Raises TypeError and ValueError as ``loader`` does.
        """
        check_switches(to_device=to_device)
        return EvalLoader(
            dataset,
            batch_size,
            rank=self.rank,
            world_size=self.world_size,
            at_batch=self._stop_in_evaluation,
            around=self._evaluating,
            device=self.device if to_device else None,
            **self._pinning(options),
        )

    def _pinning(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options, with pinned memory on a GPU unless they set it.

        With workers, a thread of torch pins their batches. It refuses tensors on a device, which a dataset can return
        if there are no workers.
        """
        if self.device.type != "cuda" or "pin_memory" in options:
            return dict(options)
        return {**options, "pin_memory" if options.get("num_workers") else "pins_here": True}
