"""The loader of a run (``ctx.loader()``, a different library's, or none), and which batch each step takes.

Step s takes global batch s of the loader's endless stream, on any number of ranks.

``TrainingLoader`` says how a resumed rank continues behind the samples that the run has already trained on.
``MicroBatches`` has a rank's share of a step in pieces, if it is more than the rank can take at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from clusterddp.data.external_loader import ExternalLoader, NoLoader, Passes, ReplayedLoader
from clusterddp.data.loader import Loader
from clusterddp.distributed.process_group import ProcessGroup
from clusterddp.distributed.wrapping import ddp_modules, optimizers, trained_parameters

#: Key in the group's store: where rank 0 takes its samples from.
_STREAM = "loader/stream"
#: The argument ``step`` of its methods is the number of a global batch, from 0.
Source: TypeAlias = Loader | ExternalLoader | ReplayedLoader | NoLoader


class TrainingLoader:
    """The loader of a run. The argument ``step`` of its methods is the step to be made, from 0.

    How a resumed rank finds the samples that follow those of the checkpoint depends on the loader:

    - ``ctx.loader()`` keeps no list. An order (``data/sample_order.py``) is a function from a position in one endless
      stream of epochs to a sample. Batch b of B samples has positions b * B to (b + 1) * B - 1, and each rank takes its
      slice. So the step and B in the checkpoint give the epoch and the place in it, on any number of ranks.
      The checkpoint also has the dataset's length, the order's label, ``drop_last`` and the run's seed. A restore takes
      over B, and raises CheckpointError if the others would change the samples (``Loader.restore``, ``run_state``
      for the seed).
    - A loader with ``state_dict()`` continues from its own state. All ranks send theirs to rank 0 before a save, and
      each loads its own after a restore (``ExternalLoader``).
    - Other iterables are read again from the start of the run, and the batches of the steps made are dropped
      (``ReplayedLoader.replay``).
    - A script's own loop, without ``ctx.run()``, can use ``continue_epoch`` (``training/script_loop.py``). It counts
      items after which an optimizer has stepped. The next attempt skips as many, if the script has opened its save.
    """

    def __init__(self, source: Source, seeds_steps: bool = False) -> None:
        self._source, self._seeds_steps = source, seeds_steps
        #: Whether the source can jump to any place, rather than move from batch to batch.
        self._seeks = isinstance(source, (Loader, NoLoader))
        #: The epoch of the last batch that was trained on, for a loader that has only its current one.
        self._last_epoch: int | None = None

    @property
    def given(self) -> Any:
        """The loader that ``ctx.run()`` received."""
        return self._source.given if isinstance(self._source, Passes) else self._source

    @property
    def per_rank_state(self) -> bool:
        """Whether all ranks have to ``gather`` before a save."""
        return self._source.per_rank_state

    @property
    def share(self) -> int:
        """Samples per rank and step."""
        return self._source.share

    @property
    def batch_size(self) -> int:
        """The most samples that a rank takes at once."""
        return self._source.batch_size

    @property
    def workers(self) -> int:
        """The number of processes that read for this rank. 0 if this one does."""
        return self._source.workers

    @property
    def inexact(self) -> Sequence[str]:
        """Reasons why a resume may not be exact."""
        return self._source.inexact

    def epoch(self, step: int) -> int:
        """The epoch that the first sample of a step belongs to."""
        return self._source.epoch(step)

    def ends_epoch(self, step: int) -> bool:
        """Whether a step takes the last sample of an epoch."""
        return self._source.ends_epoch(step)

    def epochs_before(self, step: int, every: int) -> bool:
        """Whether a multiple of ``every`` epochs ends between the step before and this one, the first excepted."""
        epoch = self.epoch(step)
        before = self.epoch(max(0, step - 1)) if self._seeks else self._last_epoch
        return before is not None and before // every < epoch // every

    def count_epochs(self) -> None:
        """The script acts at the ends of epochs. Raises ValueError if they would differ between ranks."""
        if isinstance(self._source, Passes):
            self._source.count_epochs()

    @property
    def larger_than_dataset(self) -> tuple[int, int] | None:
        """The global batch and the samples of the dataset, if a step takes more than all of them."""
        source = self._source
        larger = isinstance(source, Loader) and source.global_batch > source.length
        return (source.global_batch, source.length) if isinstance(source, Loader) and larger else None

    def steps_in(self, epochs: float) -> int:
        """The number of steps in this many epochs."""
        return self._source.steps_in(epochs)

    def batches(self, step: int, at_batch: Callable[[], None]) -> Iterator[Any]:
        """This rank's batches from ``step`` on, without end. Closing the iterator ends the loader's workers.

        ``at_batch`` is called before each batch that is read again, equally often on all ranks.
        """
        source = self._source
        iterator = source.batches(step, self._seeds_steps) if isinstance(source, Loader) else source.batches(step)
        try:
            if isinstance(source, ReplayedLoader):
                source.replay(step, iterator, at_batch)
            while True:
                if not self._seeks:
                    self._last_epoch = source.epoch(step)
                yield next(iterator)
                step += 1
        finally:
            iterator.close()  # type: ignore[union-attr]

    def gather(self) -> None:
        """Brings the states of all ranks' loaders to rank 0, where they have one. Collective."""
        self._source.gather()

    def progress(self, step: int) -> dict[str, Any]:
        """The loader's entries in a checkpoint."""
        return self._source.progress(step)

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Continues where the checkpoint was taken. Raises CheckpointError if the samples would not be the same."""
        self._source.restore(progress)


def training_loader(
    loader: Loader | Iterable[Any] | None, group: ProcessGroup, seed: int, seeds_steps: bool = False
) -> TrainingLoader:
    """The loader that ``ctx.run()`` received, with the methods that a run needs.

    ``seeds_steps``: whether the run seeds all generators once it has a batch.

    Raises TypeError for an object that cannot be iterated over, ValueError on a rank whose ``ctx.loader()`` is not that
    of rank 0.
    """
    if loader is None:
        return TrainingLoader(NoLoader())
    if not isinstance(loader, Loader):
        return TrainingLoader(_of_other(loader, group, seed))
    _check_same(f"{loader.length} samples in the order {loader.label!r}", group)
    return TrainingLoader(loader, seeds_steps)


def _of_other(loader: Any, group: ProcessGroup, seed: int) -> ExternalLoader | ReplayedLoader:
    """Chooses by whether the loader has a state."""
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return ExternalLoader(loader, group)
    if not hasattr(loader, "__iter__"):
        raise TypeError(
            f"run(loader=...) received an object of type {type(loader).__name__}, expected ctx.loader(), or an "
            "iterable of this rank's batches, such as torchdata's StatefulDataLoader"
        )
    return ReplayedLoader(loader, group, seed)


def _check_same(stream: str, group: ProcessGroup) -> None:
    """Raises ValueError if the ranks' streams differ, as they take their parts of one stream."""
    if group.rank == 0:
        group.store.set(_STREAM, stream)
    elif (of_rank_0 := group.store.get(_STREAM).decode()) != stream:
        raise ValueError(
            f"rank {group.rank} has {stream}, but rank 0 has {of_rank_0}. Give ctx.loader() the same dataset and order "
            "on every rank. ctx.loader() gives each rank its part"
        )


def sizes(samples: int, most: int) -> list[int]:
    """Splits ``samples`` into the fewest pieces of at most ``most``, as equal as possible, larger ones first."""
    count = -(-samples // most)
    least, larger = divmod(samples, count)
    return [least + 1] * larger + [least] * (count - larger)


def cut(batch: Any, parts: list[int], name: str = "batch") -> list[Any]:
    """Splits a batch into pieces of ``parts`` samples: tensors along their first dimension, lists, and nests of them.

    A list or tuple whose items all have the batch's length holds columns. Any other is itself a column of samples.
    Raises TypeError for anything of a different length, or without one.
    """
    if isinstance(batch, Mapping):
        columns = {key: cut(value, parts, f"{name}[{key!r}]") for key, value in batch.items()}
        return [type(batch)({key: pieces[i] for key, pieces in columns.items()}) for i in range(len(parts))]  # type: ignore[call-arg]
    if isinstance(batch, (list, tuple)) and batch and all(_is_cut(item, sum(parts)) for item in batch):
        pieces = zip(*(cut(item, parts, f"{name}[{i}]") for i, item in enumerate(batch)), strict=True)
        is_named = hasattr(batch, "_fields")
        return [type(batch)(*items) if is_named else type(batch)(items) for items in pieces]
    if _length(batch) != sum(parts):
        raise TypeError(
            f"run.micro() received {name} of type {type(batch).__name__} and length {_length(batch)}, expected the "
            f"rank's {sum(parts)} samples as a tensor or list, or a tuple, list or dict of them"
        )
    ends = [sum(parts[: i + 1]) for i in range(len(parts))]
    return [batch[end - part : end] for part, end in zip(parts, ends, strict=True)]


class MicroBatches:
    """Implements ``Run.micro``. One per run. ``parts``: those of the run. Modules and optimizers hold the gradients.

    A rank's share grows when the run continues on fewer ranks, because the global batch stays the same. The pieces'
    gradients accumulate in ``.grad``, and DDP reduces over the ranks with the last piece only. Piece i has n_i samples
    and the mean loss over them. The gradients are scaled by n_i / n_(i+1) after piece i, and by n_i / (n_1 + n_2 + ...)
    after the last: in the end each piece has been weighted by its fraction of the share, n_i / (n_1 + n_2 + ...).
    """

    def __init__(self, parts: Mapping[str, Any], loader: TrainingLoader) -> None:
        self._loader = loader
        self._modules = [part for part in parts.values() if isinstance(part, torch.nn.Module)]
        self._in_ddp = [module for part in parts.values() for module in ddp_modules(part)]
        self._optimizers = [*optimizers(parts).values()]
        #: How often an optimizer has stepped, counted by the run.
        self.optimizer_steps = 0
        self._used = self._unfinished = self._said = False
        #: Whether the share is larger than the rank can take at once; known once the loader has its global batch.
        self._too_large: bool | None = None

    def pieces(self, batch: Any) -> Iterator[Any]:
        """See ``Run.micro``."""
        self._used = self._unfinished = True
        parts = sizes(self._loader.share, self._loader.batch_size)
        pieces = [batch] if len(parts) == 1 else cut(batch, parts)
        if len(parts) > 1:
            self._scale(sum(parts) / parts[0])  # what the loop's earlier steps accumulated keeps its weight
        with contextlib.ExitStack() as unsynchronized:
            for module in self._in_ddp:
                # A static graph needs every backward synchronized (torch 2.13: wrong gradients or a failed assertion).
                if not module.static_graph:
                    unsynchronized.enter_context(module.no_sync())
            for i, piece in enumerate(pieces):
                last = i == len(pieces) - 1
                if last:
                    unsynchronized.close()
                steps, gradients = self.optimizer_steps, self._samples()
                yield piece
                self._check_body(steps, gradients)
                self._scale(parts[i] / (sum(parts) if last else parts[i + 1]))
        self._unfinished = False

    def end_step(self) -> bool:
        """Ends a step: whether it is the first with more than ``batch_size`` samples per rank that were not split."""
        if self._unfinished:
            raise RuntimeError(
                "the loop over run.micro(batch) ended early, so the gradients cover only part of the batch. "
                "Complete it in every step"
            )
        if self._too_large is None:
            self._too_large = self._loader.share > self._loader.batch_size
        whole = not self._used and self._too_large
        first = whole and not self._said
        self._used, self._said = False, self._said or whole
        return first

    def _scale(self, factor: float) -> None:
        gradients = [p.grad for p in dict.fromkeys(self._parameters()) if p.grad is not None]
        if factor != 1 and gradients:
            torch._foreach_mul_(gradients, factor)

    def _check_body(self, optimizer_steps: int, gradients: list[torch.Tensor | None]) -> None:
        """Raises RuntimeError also for mistakes that have an effect only with several pieces."""
        if self.optimizer_steps != optimizer_steps:
            raise RuntimeError(
                "the optimizer stepped inside the loop over run.micro(batch). Call optimizer.step() after the loop"
            )
        if all(parameter.grad is None for parameter in self._parameters()):
            raise RuntimeError("there are no gradients. Call loss.backward() inside the loop over run.micro(batch)")
        now = self._samples()
        if any(one is not None and one is not other for one, other in zip(gradients, now, strict=True)):
            raise RuntimeError(
                "gradients were zeroed inside the loop over run.micro(batch). Call zero_grad() outside the loop"
            )

    def _samples(self) -> list[torch.Tensor | None]:
        """A gradient of each model, into which backward accumulates in place. None where DDP may replace the tensor."""
        if any(module.gradient_as_bucket_view for module in self._in_ddp):
            return []
        return [next((p.grad for p in module.parameters()), None) for module in self._modules]

    def _parameters(self) -> Iterator[torch.Tensor]:
        """The parameters of all parts, possibly with repetitions."""
        for module in self._modules:
            yield from module.parameters()
        for optimizer in self._optimizers:
            yield from trained_parameters(optimizer)


def _length(item: Any) -> int | None:
    """The first dimension of a tensor or array, or the length of a list or tuple. None for anything else."""
    if hasattr(item, "shape"):
        return int(item.shape[0]) if len(item.shape) else None
    return len(item) if isinstance(item, (list, tuple)) else None


def _is_cut(item: Any, length: int) -> bool:
    """Whether ``cut`` treats the item as a column, or a nest of columns."""
    if isinstance(item, Mapping):
        return all(_is_cut(value, length) for value in item.values())
    if isinstance(item, (list, tuple)) and item and all(_is_cut(value, length) for value in item):
        return True
    return _length(item) == length
