"""The values that a script logs in a step, as they are at the call of ``run.log()``.

A value on the CPU is read at once, so that the script may change the tensor later. A value on a GPU is copied into
pinned memory behind the kernels that are already queued on its stream, and an event is recorded behind the copy. The
training thread never waits for the GPU: at the end of a step it reads the copies whose events have passed. Other
threads do not query events, because that would make the capture of a CUDA graph fail (in the usual mode, "global").
The training thread captures no graph at the end of a step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

import torch

from clusterddp.distributed.devices import pinned

#: The most that the values of one step may take in the file. The same holds for an event, sent to the supervisor.
MOST_BYTES = 1_000_000
#: The most that a number takes in a line, with its punctuation.
_NUMBER_BYTES = 32
#: The most names whose sizes are remembered.
_MOST_SIZES = 10_000
#: How many pinned numbers of a dtype are allocated at once: allocating may wait for the GPU.
_SLOTS = 1024
Reduction = Literal["mean", "sum", "min", "max"]
_REDUCTIONS = get_args(Reduction)


class Event(Protocol):
    """The used part of ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Whether everything before it is done. Raises RuntimeError after a CUDA error."""
        ...

    def synchronize(self) -> None:
        """Waits for that."""
        ...


class DeviceCopy:
    """A number on its way from a GPU."""

    __slots__ = ("_event", "_free", "_slot")

    def __init__(self, slot: torch.Tensor, event: Event, free: list[torch.Tensor]) -> None:
        self._slot, self._event, self._free = slot, event, free

    def ready(self) -> bool:
        """Whether ``take`` would not wait."""
        return self._event.query()

    def take(self) -> Any:
        """The number. To be called once, because the memory is used again."""
        self._event.synchronize()
        number = self._slot.item()
        self._free.append(self._slot)
        return number


class DeviceCopies:
    """Copies numbers from GPUs without waiting for them. For the training thread.

    Args:
        allocate: returns pinned tensors of a dtype without dimensions.
        record: records an event behind what is queued on the current stream of a device.
    """

    def __init__(
        self,
        allocate: Callable[[torch.dtype], Iterable[torch.Tensor]] | None = None,
        record: Callable[[torch.device], Event] | None = None,
    ) -> None:
        self._allocate, self._record = allocate or _pinned, record or _recorded
        self._free: dict[torch.dtype, list[torch.Tensor]] = {}

    def begin(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, DeviceCopy]:
        """Queues the copies, and one event for each device."""
        slots = {name: self._copy(tensor) for name, tensor in tensors.items()}
        events = {device: self._record(device) for device in {tensor.device for tensor in tensors.values()}}
        return {
            name: DeviceCopy(slots[name], events[tensor.device], self._free[tensor.dtype])
            for name, tensor in tensors.items()
        }

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of the same dtype: a conversion would be one more kernel, and could change the value."""
        free = self._free.setdefault(tensor.dtype, [])
        if not free:
            free.extend(self._allocate(tensor.dtype))
        slot = free.pop()
        slot.copy_(tensor.detach().reshape(()), non_blocking=True)
        return slot


def _pinned(dtype: torch.dtype) -> Iterable[torch.Tensor]:
    return pinned(torch.empty(_SLOTS, dtype=dtype)).unbind()


def _recorded(device: torch.device) -> Event:
    event: Event = torch.cuda.current_stream(device).record_event()
    return event


@dataclass(slots=True)
class Logged:
    """The values of a step by name, some of which may still be on their way from a GPU (``copied``).

    ``reduced``: the names whose values of all ranks are combined, and how.
    """

    values: dict[str, Any] = field(default_factory=dict)
    reduced: dict[str, str] = field(default_factory=dict)
    copied: bool = False

    def arrived(self) -> bool:
        """Whether all values are numbers by now. Asks the GPU, and does not wait for it."""
        if self.copied and all(value.ready() for value in self.values.values() if isinstance(value, DeviceCopy)):
            self.numbers()
        return not self.copied

    def numbers(self) -> dict[str, Any]:
        """All values as numbers. Waits for those on their way."""
        if self.copied:
            copies = self.values.items()
            self.values = {name: value.take() if isinstance(value, DeviceCopy) else value for name, value in copies}
            self.copied = False
        return self.values


class Values:
    """The values logged in a step, merged. The last value of each name counts.

    ``keeps_own``: whether values that are not reduced are kept, which is so on rank 0.
    """

    def __init__(self, keeps_own: bool = True, copies: DeviceCopies | None = None) -> None:
        self._keeps_own, self._copies = keeps_own, copies or DeviceCopies()
        self._logged = Logged()
        self._bytes = 0
        #: The most that each name takes in a line with its value: most steps log the same names.
        self._sizes: dict[str, int] = {}

    def add(self, values: Mapping[str, Any], reduce: str | None = None) -> None:
        """Raises TypeError for a value that is not a number, ValueError for too large values or a wrong ``reduce``."""
        keeps = self._keeps_own or reduce is not None
        logged, size, sizes = self._logged, self._bytes, self._sizes
        numbers: dict[str, Any] = {}
        on_gpus = False
        for name, value in values.items():
            if type(value) is not float:
                value = _read(name, value, keeps)
                on_gpus |= isinstance(value, torch.Tensor)
            numbers[name] = value
            if name not in logged.values:
                size += sizes.get(name) or self._size(name)
        if reduce is not None and reduce not in _REDUCTIONS:
            raise ValueError(
                f"run.log(reduce={reduce!r:.60}): expected one of {', '.join(map(repr, _REDUCTIONS))}. A metric "
                "cannot be called 'reduce'"
            )
        if size > MOST_BYTES:
            raise ValueError(_too_large(values, size))
        if reduce is not None:
            logged.reduced.update(dict.fromkeys(values, reduce))
        elif logged.reduced:
            for name in logged.reduced.keys() & values.keys():
                del logged.reduced[name], logged.values[name]
        if keeps:
            logged.values.update(numbers)
            self._bytes = size
            if on_gpus:
                tensors = {name: value for name, value in numbers.items() if isinstance(value, torch.Tensor)}
                logged.values.update(self._copies.begin(tensors))
                logged.copied = True

    def take(self) -> Logged:
        """Returns all values, and clears them."""
        logged = self._logged
        self._logged, self._bytes = Logged(), 0
        return logged

    def _size(self, name: str) -> int:
        if len(self._sizes) >= _MOST_SIZES:
            self._sizes.clear()
        self._sizes[name] = size = len(json.dumps(name)) + _NUMBER_BYTES
        return size


def _too_large(values: Mapping[str, Any], size: int) -> str:
    names = [f"{name:.60}=..." for name in list(values)[:2]] + ["..."] * (len(values) > 2)
    return (
        f"run.log({', '.join(names)}): the values of one step would take {size:,} bytes, but the limit is "
        f"{MOST_BYTES:,}. Write them to your own file"
    )


def _read(name: str, value: Any, keeps: bool) -> Any:
    """A value at the call, checked: the number, or a tensor that is still to be copied from a GPU. Not ``keeps``: it is
    only checked."""
    if type(value) is float:
        return value
    if type(value) is torch.Tensor and value.is_cpu and keeps and value.numel() == 1 and not value.is_complex():
        return value.item()  # the usual case, for which more checks would take longer than this
    check(name, value)
    return number(name, value) if keeps and not getattr(value, "is_cuda", False) else value


def number(name: str, value: Any) -> int | float:
    """A checked value as an int or float. Synchronizes with a tensor's device."""
    found = value.item() if hasattr(value, "item") else value
    if isinstance(found, int):
        return found
    try:
        return float(found)  # also numpy's longdouble
    except (TypeError, ValueError) as error:
        raise TypeError(f"run.log({name}=...): expected a number, got {type(value).__name__} ({error})") from error


def check(name: str, value: Any) -> None:
    """Raises TypeError for anything but a number or a tensor of one real number, ValueError for an integer of more than
    64 bits. Does not synchronize with a device."""
    if type(value) is float:
        return
    size = value.numel() if hasattr(value, "numel") else getattr(value, "size", 1)
    got = None
    if size != 1:
        got = f"{size} elements ({type(value).__name__})"
    elif hasattr(value, "item"):
        got = None if _is_real(value) else f"{getattr(value, 'dtype', None)} ({type(value).__name__})"
    elif not isinstance(value, (int, float)):
        got = f"{value!r:.60} ({type(value).__name__})"
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ValueError(f"run.log({name}=...): expected at most 64 bits, got an integer of {value.bit_length()} bits")
    if got is not None:
        raise TypeError(f"run.log({name}=...): expected a number or a tensor of one element, got {got}")


def _is_real(value: Any) -> bool:
    """Whether the one element of a tensor or array is a real number, by its dtype."""
    if hasattr(value, "is_complex"):
        return not (value.is_complex() or value.is_meta)
    return getattr(getattr(value, "dtype", None), "kind", "f") not in "cSUOMm"
