"""Copies of a state, each tensor on the device where a part has it.

A part may keep a tensor that is offered to it, instead of a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

import torch

from clusterddp.checkpoint.packing import SAVED_FROM, Packed, pack

#: An attribute of a tensor, because the tensor passes through ``load_state_dict`` methods of torch and of the script,
#: which pass on only tensors. A copy that one of them makes lacks the attribute.
_OFFERED = "_clusterddp_offered"


def offer(tensor: torch.Tensor) -> None:
    """Lets a part keep this tensor, whose memory has no other user."""
    setattr(tensor, _OFFERED, True)


def take_over(tensor: torch.Tensor) -> bool:
    """Whether a part may keep the tensor instead of a copy. Only the first caller may."""
    if not getattr(tensor, _OFFERED, False):
        return False
    delattr(tensor, _OFFERED)
    vars(tensor).pop(SAVED_FROM, None)
    return True


def copied(state: Mapping[str, Any]) -> Any:
    """A copy of a state in which each tensor has its own memory. Tied tensors stay tied."""
    packed = _packed(state)
    return packed.unpacked({name: tensor.clone() for name, tensor in packed.tensors.items()})


def placed(state: Mapping[str, Any], present: Callable[[], Any], kept: Set[int] = frozenset()) -> Any:
    """``copied``, with each tensor on the device of the one at its place in the ``present`` state. If there is none, on
    the GPU that has the place of the one from which it was saved among the rank's GPUs.

    Tensors whose id is ``kept`` are not copied.
    """
    packed = _packed(state)
    devices = _devices(present) if torch.cuda.is_initialized() else {}  # type: ignore[no-untyped-call]
    found = {}
    for name, tensor in packed.tensors.items():
        device = devices.get(name) or _saved_device(tensor)
        if id(tensor) in kept or (device == tensor.device and take_over(tensor)):
            found[name] = tensor
        else:
            found[name] = tensor.to(device, copy=True)
    return packed.unpacked(found)


@torch.no_grad()
def _packed(state: Any) -> Packed:
    return Packed(state)


def _devices(present: Callable[[], Any]) -> dict[str, torch.device]:
    try:
        return {name: tensor.device for name, tensor in pack(present())[1].items()}
    except Exception:  # the script's own code may expect to run only on rank 0
        return {}


def _saved_device(tensor: torch.Tensor) -> torch.device:
    """The device of this rank for a tensor of which the part has none at present."""
    gpu = getattr(tensor, SAVED_FROM, None)
    if gpu is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return tensor.device
    first = torch.cuda.current_device()
    return torch.device("cuda", first + gpu if 0 <= first + gpu < torch.cuda.device_count() else first)
