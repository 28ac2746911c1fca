"""A rank's place among the ranks, and what all ranks do together: the methods of ``ctx`` that concern no run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from clusterddp.distributed import collectives, process_group, wrapping
from clusterddp.distributed.store import NO_TIMEOUT


class Ranks:
    """The part of ``Context`` that needs no run; documented there."""

    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    devices: tuple[torch.device, ...]
    _group: process_group.ProcessGroup
    #: The blocks of ``local_first`` and ``main_first`` so far.
    _turns = 0

    def _waiting(self) -> AbstractContextManager[None]:
        """The body waits for other ranks."""
        return nullcontext()

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def print(self, *values: object, **options: Any) -> None:
        """``print`` on rank 0 only, flushed.

        Args:
            values: what to print.
            options: keyword arguments of ``print``.
        """
        if self.is_main:
            print(*values, **{"flush": True, **options})

    def local_first(self) -> AbstractContextManager[None]:
        """Runs a ``with`` block on local rank 0 of every node first, then on the node's other ranks. Collective."""
        return self._first(f"local_first/{self.node_rank}", self.local_rank == 0)

    def main_first(self) -> AbstractContextManager[None]:
        """Runs a ``with`` block on rank 0 first, then on all others: for files on a shared disk. Collective."""
        return self._first("main_first", self.is_main)

    @contextmanager
    def _first(self, of: str, first: bool) -> Iterator[None]:
        turn = f"{of}/{self._turns}"
        self._turns += 1
        if not first:
            with self._waiting():
                self._group.store.wait([turn], NO_TIMEOUT)
        try:
            yield
        finally:
            if first:
                self._group.store.set(turn, "")

    def wrap(self, model: torch.nn.Module, *, all_used_once: bool = False, **options: Any) -> DistributedDataParallel:
        """Moves the model to this rank's device and wraps it in DDP, such that resumed runs are exact. Collective.

        With several devices per rank, the model's parts stay where the script has put them.

        Args:
            model: the model, not yet in DDP.
            all_used_once: only with ``static_graph=True``, for an exact resume at 3 or more ranks: promises that every
                parameter gets its gradient in every backward, in one piece (no unused parameters, no reentrant
                checkpointing). A broken promise raises in one of the first two steps.
            options: of DistributedDataParallel, such as ``find_unused_parameters=True``.

        Returns the DDP module; the model itself is its ``module``.

        Raises TypeError for anything but a module that is not in DDP yet, and for ``all_used_once`` alone.
        """
        return wrapping.wrap(model, self.devices, all_used_once=all_used_once, **options)

    def all_reduce_sum(self, value: torch.Tensor | float) -> torch.Tensor | float:
        """The sum over all ranks, on every rank. Collective.

        Args:
            value: a tensor of the same shape on every rank, or a number.

        Returns a tensor of the same dtype and device for a tensor, a float for a number.
        """
        with self._waiting():
            return collectives.all_reduce_sum(value, self._group.collective_device)

    def all_reduce_mean(self, value: torch.Tensor | float, weight: float = 1.0) -> float:
        """The weighted mean of one number per rank, on every rank. Collective.

        Args:
            value: this rank's number, or a tensor of one element.
            weight: its weight, usually the number of samples behind it.

        Returns the mean; nan if all weights are 0.
        """
        with self._waiting():
            return collectives.all_reduce_mean(value, weight, self._group.collective_device)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenates the tensors of all ranks along the first dimension, in rank order, on every rank. Collective.

        Args:
            tensor: with at least one dimension; the first may differ between ranks, the others and the dtype may not.

        Returns the concatenation, on the tensor's device.
        """
        with self._waiting():
            return collectives.gather(tensor, self._group.collective_device)
