"""DistributedDataParallel around the user's model, so that a resumed run sums gradients in the same order."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


class _SumOfParameters(torch.nn.Module):
    """Stands in for the user's model: every parameter takes part, no batch and no buffer does."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__()
        self._sums = lambda: [parameter.sum().abs().float() for parameter in parameters]

    def forward(self) -> torch.Tensor:
        return torch.stack(self._sums()).sum() * 0  # type: ignore[no-untyped-call]


def wrap(model: torch.nn.Module, device: torch.device, **options: Any) -> DistributedDataParallel:
    """The model on its device, in DDP, with its gradient buckets in their final order.

    DDP rebuilds its buckets after the first iteration, by the order in which gradients came. A resumed run would make
    that first iteration at step S, sum it in the old order, and differ from the uninterrupted run from there on (seen
    at 3 and more ranks). A throw-away pass settles the order before any step, here and after every resume.

    Not so with ``static_graph``: DDP takes how often each parameter is used from the first pass it sees. With a made-up
    one it then refuses a model with unused parameters, and sums reentrant checkpointing's gradients too early (seen in
    2.13: wrong gradients, no error). Such a resume is not exact at 3 and more ranks.
    """
    model = model.to(device)
    if device.type == "cuda":
        options = {"device_ids": [device.index], **options}
    wrapped = DistributedDataParallel(model, **options)
    if not wrapped.static_graph:
        _settle_buckets(wrapped)
    return wrapped


def _settle_buckets(wrapped: DistributedDataParallel) -> None:
    """One pass through all parameters: DDP rebuilds its buckets by it, before the next. Nothing else is touched."""
    model, broadcast_buffers = wrapped.module, wrapped.broadcast_buffers
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    wrapped._modules["module"], wrapped.broadcast_buffers = _SumOfParameters(parameters), False
    try:
        wrapped().backward()
    finally:
        wrapped._modules["module"], wrapped.broadcast_buffers = model, broadcast_buffers
    for parameter in parameters:
        parameter.grad = None
