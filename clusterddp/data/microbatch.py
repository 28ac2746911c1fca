"""Micro-batches: a rank's share of a step in pieces, if it is more than the rank can take at once.

The share grows when the run continues on fewer ranks, because the global batch stays the same. The pieces' gradients
accumulate in ``.grad``, and DDP reduces over the ranks with the last piece only. Piece i has n_i samples and the mean
loss over them. The gradients are scaled by n_i / n_(i+1) after piece i, and by n_i / (n_1 + n_2 + ...) after the last:
in the end each piece has been weighted by its fraction of the share, n_i / (n_1 + n_2 + ...).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from clusterddp.data.training_loader import TrainingLoader
from clusterddp.distributed.wrapping import ddp_modules, optimizers, trained_parameters


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
    """Implements ``Run.micro``. One per run. ``parts``: those of the run. Modules and optimizers hold the gradients."""

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
                "the loop over run.micro(batch) ended early, so the gradients cover only part of the batch"
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
