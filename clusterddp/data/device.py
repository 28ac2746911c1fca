"""Batches on the GPU: copied on a separate stream, while the GPU still computes. The CPU never waits for the GPU.

The copies of a batch are queued on the side stream and followed by an event. The stream that the script computes on
waits for that event. A tensor's memory belongs to the side stream: ``record_stream`` keeps it from being used again
before the script's stream is done with it. The pinned memory that is copied from is kept by torch until the copy is
done. With workers, the copy of a batch begins one step ahead, so that it never delays a step. Without them, reading
ahead would delay the step itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch


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


def pinned(batch: Any) -> Any:
    """The batch with its tensors in pinned memory, except those that are on a device or not dense."""
    return mapped(batch, lambda tensor: tensor.pin_memory() if _is_on_host(tensor) else tensor)


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
