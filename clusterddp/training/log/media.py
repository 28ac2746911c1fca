"""``run.log_media()``: images, histograms and texts of a step, checked and copied at the call.

A copy on the CPU is made at once, one from a GPU behind the kernels that are queued on its stream: nothing waits for
the GPU. ``media_file.py`` does the rest in a thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy
import torch

from clusterddp.training.log.values import Event

#: The most bytes of an image's pixels and the most numbers of a histogram, as they are copied.
MOST_PIXEL_BYTES, MOST_NUMBERS = 4_000_000, 10_000_000
MOST_CHARACTERS = 100_000
#: The most that the media of a step may take in memory.
MOST_BYTES = 64_000_000
Kind = Literal["image", "histogram", "text"]
_CHANNELS = (1, 3, 4)


@dataclass(frozen=True, slots=True)
class Medium:
    """An image (height x width x channels, or channels first), the numbers of a histogram, or a text."""

    kind: Kind
    name: str
    value: torch.Tensor | str
    channels_first: bool = False
    event: Event | None = None
    """Passes when a copy from a GPU is complete."""


class Media:
    """The media logged in a step; the last of each kind and name counts."""

    def __init__(self) -> None:
        self._media: dict[tuple[str, str], Medium] = {}

    def add(
        self, images: Mapping[str, Any] | None, histograms: Mapping[str, Any] | None, text: Mapping[str, str] | None
    ) -> None:
        """Raises TypeError for values of other types and shapes, ValueError for too large ones."""
        new = [_image(name, value) for name, value in _named("images", images)]
        new += [_histogram(name, value) for name, value in _named("histograms", histograms)]
        new += [_text(name, value) for name, value in _named("text", text)]
        named: dict[tuple[str, str], Medium] = {(medium.kind, medium.name): medium for medium in new}
        size = sum(map(_size, (self._media | named).values()))
        if size > MOST_BYTES:
            raise ValueError(f"run.log_media(): {size:,} bytes in one step, and the limit is {MOST_BYTES:,}")
        self._media |= {key: _copied(medium) for key, medium in named.items()}

    def __bool__(self) -> bool:
        """Whether there are some."""
        return bool(self._media)

    def take(self) -> list[Medium]:
        """Returns all, and clears them."""
        media, self._media = self._media, {}
        return list(media.values())


def _named(argument: str, values: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    if values is None:
        return []
    if not isinstance(values, Mapping):
        raise TypeError(f"run.log_media({argument}=...): expected a dict by name, got {type(values).__name__}")
    if wrong := [name for name in values if not isinstance(name, str) or not 0 < len(name) <= 200]:
        raise TypeError(f"run.log_media({argument}=...): expected names of 1 to 200 characters, got {wrong[0]!r:.60}")
    return list(values.items())


def _image(name: str, value: Any) -> Medium:
    """A tensor has its channels first, as in torchvision; a numpy array last, as in PIL and matplotlib."""
    array, first = _array("images", name, value), isinstance(value, torch.Tensor)
    channels = 1 if array.ndim == 2 else array.shape[0 if first else -1] if array.ndim == 3 else 0
    if channels not in _CHANNELS or 0 in array.shape:
        order = "channels x height x width" if first else "height x width x channels"
        raise TypeError(
            f"run.log_media(images={{{name!r:.60}: ...}}): expected height x width, or {order} with 1, 3 or 4 "
            f"channels, got the shape {tuple(array.shape)}"
        )
    if array.dtype != torch.uint8 and not array.is_floating_point():
        raise TypeError(
            f"run.log_media(images={{{name!r:.60}: ...}}): expected uint8 from 0 to 255, or floats from 0 to 1, got "
            f"{array.dtype}"
        )
    if array.numel() > MOST_PIXEL_BYTES:
        raise ValueError(
            f"run.log_media(images={{{name!r:.60}: ...}}): {array.numel():,} pixels times channels, and the limit is "
            f"{MOST_PIXEL_BYTES:,}; log a smaller image"
        )
    return Medium("image", name, array, channels_first=first and array.ndim == 3)


def _histogram(name: str, value: Any) -> Medium:
    array = _array("histograms", name, value)
    if array.numel() > MOST_NUMBERS:
        raise ValueError(
            f"run.log_media(histograms={{{name!r:.60}: ...}}): {array.numel():,} numbers, and the limit is "
            f"{MOST_NUMBERS:,}; log some of them, such as value.flatten()[::100]"
        )
    return Medium("histogram", name, array)


def _text(name: str, value: Any) -> Medium:
    if not isinstance(value, str):
        raise TypeError(f"run.log_media(text={{{name!r:.60}: ...}}): expected text, got {type(value).__name__}")
    if len(value) > MOST_CHARACTERS:
        raise ValueError(
            f"run.log_media(text={{{name!r:.60}: ...}}): {len(value):,} characters, and the limit is "
            f"{MOST_CHARACTERS:,}; write it to your own file"
        )
    return Medium("text", name, value)


def _array(argument: str, name: str, value: Any) -> torch.Tensor:
    """Real numbers as a tensor, not copied yet."""
    try:
        if isinstance(value, numpy.ndarray):
            value = torch.from_numpy(
                value if value.dtype.isnative and min(value.strides, default=0) >= 0 else value.copy()
            )
    except TypeError:
        pass  # of a dtype that torch does not have
    if not isinstance(value, torch.Tensor) or value.is_complex() or value.is_meta:
        given = f"{type(value).__name__} of {value.dtype}" if hasattr(value, "dtype") else type(value).__name__
        raise TypeError(
            f"run.log_media({argument}={{{name!r:.60}: ...}}): expected a tensor or a numpy array of real numbers, got "
            f"{given}"
        )
    return value.detach()


def _copied(medium: Medium) -> Medium:
    value = medium.value
    if isinstance(value, str):
        return medium
    if not value.is_cuda:
        return Medium(medium.kind, medium.name, value.clone(), medium.channels_first)
    copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    copy.copy_(value, non_blocking=True)
    event = torch.cuda.current_stream(value.device).record_event()
    return Medium(medium.kind, medium.name, copy, medium.channels_first, event)


def _size(medium: Medium) -> int:
    value = medium.value
    return len(value) if isinstance(value, str) else value.numel() * value.element_size()
