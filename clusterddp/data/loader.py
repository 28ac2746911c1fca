"""Which rank sees which sample in which step: a pure function of (seed, step, rank), so that a resume is exact.

All samples form one endless stream, given by an order (``sample_order.py``). Step s with global batch B takes positions
s * B to (s + 1) * B - 1, and each rank its slice of them. An epoch's last step is filled from the next epoch, so that
ranks are never short of samples, and any step is found in constant time.

``EvalLoader`` has the samples of an evaluation: each once over all ranks, with points between the batches where the run
can stop.

Batches for a GPU are copied on a separate stream, while the GPU still computes. The CPU never waits for the GPU. The
copies of a batch are queued on the side stream and followed by an event. The stream that the script computes on waits
for that event. A tensor's memory belongs to the side stream: ``record_stream`` keeps it from being used again before
the script's stream is done with it. The pinned memory that is copied from is kept by torch until the copy is done. With
workers, the copy of a batch begins one step ahead, so that it never delays a step. Without them, reading ahead would
delay the step itself.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import profiler
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from clusterddp.data import randomness
from clusterddp.data.sample_order import Binding, BoundOrder, Order
from clusterddp.data.seeding import Batch, SeededSamples
from clusterddp.data.workers import ShieldedDataLoader, close
from clusterddp.distributed.devices import pinned
from clusterddp.errors import CheckpointError, CheckpointMismatch
from clusterddp.reporter import counted


@dataclass(frozen=True)
class Copying:
    """A batch whose copies are queued: its tensors on the GPU, and the event after the last copy."""

    batch: Any
    tensors: list[torch.Tensor]
    done: torch.cuda.Event


class ToDevice:
    """Copies batches to a GPU. For the thread that computes there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, batch: Any) -> Copying:
        """Queues the copies of a batch's tensors."""
        tensors: list[torch.Tensor] = []

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            if not _is_on_host(tensor):
                return tensor
            tensors.append(tensor.to(self._device, non_blocking=True))
            return tensors[-1]

        with torch.cuda.stream(self._stream):
            moved = mapped(batch, copied)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return Copying(moved, tensors, done)

    def take(self, copying: Copying) -> Any:
        """The batch, for the current stream, which waits for the copies."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(copying.done)
        for tensor in copying.tensors:
            tensor.record_stream(current)
        return copying.batch

    def each(self, batches: Iterable[Any], ahead: bool) -> Iterator[Any]:
        """The batches on the device. ``ahead``: each but the first is copied before the one before it is handed out."""
        waiting: Copying | None = None
        for number, batch in enumerate(batches):
            begun = self.begin(batch)
            if number == 0 or not ahead:  # the first step does not wait for a second batch
                yield self.take(begun)
                continue
            if waiting is not None:
                yield self.take(waiting)
            waiting = begun
        if waiting is not None:
            yield self.take(waiting)


def to_device(device: torch.device | None) -> ToDevice | None:
    """Copies batches to this device. None on a CPU."""
    return ToDevice(device) if device is not None and device.type == "cuda" else None


def pinned_batch(batch: Any) -> Any:
    """The batch with its tensors in pinned memory, except those that are on a device or not dense."""
    return mapped(batch, lambda tensor: pinned(tensor) if _is_on_host(tensor) else tensor)


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout == torch.strided


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A batch with its tensors changed: those in tuples, lists, dicts and nests of them. Other objects stay as they
    are, such as a PackedSequence, which has a ``to`` that the script calls."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if hasattr(value, "to"):
        return value
    if isinstance(value, MutableMapping):
        clone = copy.copy(value)
        clone.update({key: mapped(one, change) for key, one in value.items()})
        return clone
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(one, change) for one in value))
    if type(value) in (tuple, list):
        return type(value)(mapped(one, change) for one in value)
    return value


#: Arguments that are True or False. None is the default of ``shuffle``.
_SWITCHES = ("shuffle", "drop_last", "to_device", "pin_memory", "persistent_workers", "in_order")


def check_switches(**given: Any) -> None:
    """Raises TypeError for a switch that is neither True nor False, because text and numbers would count as one."""
    for name in _SWITCHES:
        value = given.get(name, False)
        if not isinstance(value, bool) and not (name == "shuffle" and value is None):
            raise TypeError(f"{name} is {value!r}, expected True or False")


def checked(dataset: Dataset[Any], batch_size: int, options: dict[str, Any]) -> tuple[int, int]:
    """The length of the dataset and the batch size. Raises TypeError or ValueError."""
    check_switches(**options)
    known = inspect.signature(DataLoader.__init__).parameters.keys() | {"order"}
    for name in sorted(options.keys() - known):
        nearest = "".join(f". Did you mean {near}?" for near in difflib.get_close_matches(name, known, 1))
        raise TypeError(f"{name!r} is not an option of the loader or of torch's DataLoader{nearest}")
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"{type(dataset).__name__} has no length and no index, so a run cannot resume mid-epoch. Use a dataset "
            "with __len__ and __getitem__, or give ctx.run() a loader that has a state, such as torchdata's "
            "StatefulDataLoader"
        )
    try:
        number = operator.index(batch_size)
    except TypeError:
        raise TypeError(f"batch_size is {batch_size!r}, expected an integer") from None
    if number < 1:
        raise ValueError(f"batch_size is {number}, expected the number of samples per rank and step, 1 or more")
    if not len(dataset):
        raise ValueError(f"the dataset ({type(dataset).__name__}) has no samples")
    return len(dataset), number


class Loader:
    """The training samples of this rank: made by ``Context.loader``, read by ``Run.steps``.

    ``len()`` is the number of steps per epoch: without ``drop_last`` that of the first, whose last step is filled from
    the next epoch. Others take as many, or one less.

    Attributes:
        dataset: the dataset.
        length: the number of samples.
        batch_size: samples per rank and step. If the world size changed, or the job sets ``global_batch``, the largest
            number that a rank takes at once (see ``Run.micro``).
        global_batch: samples per step over all ranks. Fixed by the run's first attempt.
    """

    per_rank_state = False

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        order: Order,
        seed: int,
        rank: int,
        world_size: int,
        drop_last: bool = False,
        global_batch: int | None = None,
        device: torch.device | None = None,
        pins_here: bool = False,
        **options: Any,
    ) -> None:
        self.length, self.batch_size = checked(dataset, batch_size, {**options, "drop_last": drop_last})
        self.dataset = dataset
        if global_batch is not None and global_batch % world_size:
            raise ValueError(f"global_batch {global_batch} is not divisible by {world_size} ranks. Choose a multiple")
        self.global_batch = global_batch or self.batch_size * world_size
        self.inexact: list[str] = []
        self._asked = global_batch
        self._unbound, self._seed, self._drop_last = order, seed, drop_last
        self._samples = SeededSamples(dataset, seed, options.get("collate_fn"))
        self._rank, self._world_size, self._options = rank, world_size, options
        self._copies, self._pins_here = to_device(device), pins_here
        self._stream = self._bound()
        DataLoader(self._samples, batch_sampler=[], **options)  # rejects bad values here rather than in the loop

    @property
    def label(self) -> str:
        """The order's name, as a checkpoint records it."""
        return self._stream.label

    def _bound(self) -> BoundOrder:
        return self._unbound.bind(Binding(self.length, self._seed, self.global_batch, self._drop_last))

    def gather(self) -> None:
        """Has no effect, because the position follows from the step."""

    def progress(self, step: int) -> dict[str, Any]:
        """The loader's entries in a checkpoint."""
        return {
            "epoch": self.epoch(step),
            "samples": step * self.global_batch,
            "global_batch": self.global_batch,
            "dataset_length": self.length,
            "order": self.label,
            "drop_last": self._drop_last,
        }

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Takes over the run's global batch, at any world size.

        Raises CheckpointError when the sample order could not be kept.
        """
        if "dataset_length" not in progress:
            started = "with your own loader. Pass that loader to ctx.run() again"
            if "loaders" not in progress:
                started = "without a loader. Leave out loader= in ctx.run(), or start a new run"
            raise CheckpointMismatch(f"the run started {started}")
        global_batch, length = progress["global_batch"], progress["dataset_length"]
        if length != self.length:
            raise CheckpointError(
                f"the run started with {counted(length, 'sample')}, but the dataset now has {self.length}, which would "
                "change the sample order. Use the same dataset, or start a new run"
            )
        if self._asked not in (None, global_batch):
            raise CheckpointMismatch(
                f"the run started with a global batch of {counted(global_batch, 'sample')}, but global_batch is now "
                f"{self._asked}, which would change the sample order. Keep the old value, or start a new run"
            )
        if global_batch % self._world_size:
            raise CheckpointMismatch(
                f"the run's global batch of {counted(global_batch, 'sample')} is not divisible by {self._world_size} "
                "ranks. Use a number of ranks that divides it"
            )
        drop_last = progress["drop_last"]
        if drop_last != self._drop_last:
            raise CheckpointMismatch(
                f"the run started with drop_last={drop_last}, but the loader now has drop_last={self._drop_last}, "
                "which would change the sample order. Keep the old value, or start a new run"
            )
        if progress["order"] != self.label:
            raise CheckpointMismatch(
                f"the run started with the order {progress['order']!r}, but the loader's order is now {self.label!r}. "
                "Use the same order and weights, or start a new run"
            )
        if global_batch != self.global_batch:
            self.global_batch = global_batch
            self._stream = self._bound()

    @property
    def _order(self) -> BoundOrder:
        """Raises ValueError if epochs are empty, and only here, because a resumed run's global batch may be smaller."""
        if not self._stream.length:
            raise ValueError(
                f"drop_last=True: an epoch has fewer samples than the global batch of {self.global_batch}, so it would "
                "be empty. Use a smaller batch_size, or omit drop_last"
            )
        return self._stream

    def __len__(self) -> int:
        return -(-self._order.length // self.global_batch)

    @property
    def workers(self) -> int:
        """The number of processes that read for this rank. 0 if this one does."""
        return int(self._options.get("num_workers", 0))

    @property
    def share(self) -> int:
        """Samples per rank and step."""
        return self.global_batch // self._world_size

    def epoch(self, step: int) -> int:
        """The epoch that the first sample of a step belongs to."""
        return step * self.global_batch // self._order.length

    def ends_epoch(self, step: int) -> bool:
        """Whether a step takes the last sample of an epoch."""
        return self.epoch(step + 1) > self.epoch(step)

    def steps_in(self, epochs: float) -> int:
        """The number of steps in this many epochs. The last one is filled from the next epoch."""
        return -int(-epochs * self._order.length // self.global_batch)

    def _shares(self, step: int) -> Iterator[Batch]:
        """This rank's samples of each step from ``step`` on, without end."""
        start = step * self.global_batch + self._rank * self.share
        return self._order.shares(start, self.share, self.global_batch)

    def batches(self, step: int, seeds_steps: bool = False) -> Iterator[Any]:
        """This rank's batches from ``step`` on, without end. Closing the iterator ends its workers.

        ``seeds_steps``: whether the caller seeds all generators after each batch.
        """
        iterator = self._iterator(step)
        # Samples fetched in this process would leave their seeds in the script's generators.
        read = iterator if seeds_steps or self.workers else _preserving(iterator)
        try:
            yield from read if self._copies is None else self._copies.each(read, ahead=self.workers > 0)
        finally:
            close(iterator)

    def _iterator(self, step: int) -> Iterator[Any]:
        batches: Any = self._shares(step)  # endless, unlike torch's type
        loader = ShieldedDataLoader(self._samples, batch_sampler=batches, **self._options)
        iterator: Iterator[Any] = iter(loader)  # draws a random number, in any case
        if self.workers or loader.pin_memory:
            return iterator
        read = self._read_here(batches, self._options.get("collate_fn") or default_collate)
        return map(pinned_batch, read) if self._pins_here else read

    def _read_here(self, batches: Iterator[Batch], collate: Callable[[Any], Any]) -> Iterator[Any]:
        """Does the same as torch's iterator without workers, which takes 7 us more per batch."""
        for batch in batches:
            with (
                profiler.record_function("enumerate(DataLoader)#ctx.loader")
                if profiler._is_profiler_enabled
                else nullcontext()
            ):
                found = [collate(self._samples.__getitems__(batch))]
            yield found.pop()


def _preserving(iterator: Iterator[Any]) -> Iterator[Any]:
    """The iterator's batches. Its draws do not change the script's generators. It keeps no batch."""
    while True:
        with randomness.preserved():
            found = [next(iterator)]
        yield found.pop()


_ORDERING = {"sampler", "batch_sampler", "drop_last", "order"}


class EvalLoader:
    """The evaluation samples of this rank, each once over all ranks: made by ``Context.eval_loader``.

    Rank r has samples r, r + world_size, ... in order. ``at_batch`` is called before each batch, equally often on every
    rank, even if a rank's share is a batch shorter, so that all ranks can stop together there. ``len()`` is this rank's
    number of batches.

    Attributes:
        dataset: the dataset.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        rank: int,
        world_size: int,
        at_batch: Callable[[], None],
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
        device: torch.device | None = None,
        pins_here: bool = False,
        **options: Any,
    ) -> None:
        if clash := _ORDERING & options.keys():
            raise TypeError(
                "ctx.eval_loader() takes each sample once, in the dataset's order. Leave out "
                f"{', '.join(sorted(clash))}, or loop over your own DataLoader with clusterddp.stop_requested()"
            )
        length, batch_size = checked(dataset, batch_size, options)
        share = range(rank, length, world_size)
        self.dataset = dataset
        self._loader = ShieldedDataLoader(dataset, batch_size=batch_size, sampler=share, **options)
        self._most = math.ceil(math.ceil(length / world_size) / batch_size)
        self._copies, self._pins_here = to_device(device), pins_here
        self._at_batch, self._around = at_batch, around

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        with self._around():
            yield from self._batches()

    def _batches(self) -> Iterator[Any]:
        iterator = iter(self._loader)
        batches = map(pinned_batch, iterator) if self._pins_here else iterator
        try:
            for number in range(self._most):
                self._at_batch()
                if number < len(self):
                    batch = next(batches)
                    yield batch if self._copies is None else self._copies.take(self._copies.begin(batch))
        finally:
            if not self._loader.persistent_workers:
                close(iterator)
