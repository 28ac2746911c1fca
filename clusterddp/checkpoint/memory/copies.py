"""Copies of tensors in huge pages of memory."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping

import torch

#: Bytes that each copy is aligned to, and of one piece of memory, which is free again once all copies in it are.
_ALIGNMENT, _PIECE = 64, 1 << 26


def copied_together(
    tensors: Mapping[str, torch.Tensor], allocate: Callable[[int], mmap.mmap]
) -> dict[str, torch.Tensor]:
    """Copies of tensors by name. Those on a CPU share pieces of memory, but each is a storage that cannot be resized.

    Most of the time of a copy goes into fresh pages, and huge pages halve it.
    """
    copies: dict[str, torch.Tensor] = {}
    piece, end = allocate(0), 0
    left = sum(map(_room_of, tensors.values()))
    for name, tensor in tensors.items():
        room = _room_of(tensor)
        if not room or tensor.device.type != "cpu" or not tensor.is_contiguous():
            copies[name] = tensor.clone()
            continue
        if end + room > len(piece):
            piece, end = allocate(max(room, min(left, _PIECE))), 0
        place = torch.frombuffer(piece, dtype=torch.uint8, offset=end, count=tensor.nbytes)
        copies[name] = place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        end, left = end + room, left - room
    return copies


def _room_of(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
