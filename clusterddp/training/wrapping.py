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
    at 3 and more ranks). Two throw-away passes settle the order before any step, here and after every resume. One would
    be enough but for static_graph, which rebuilds an iteration later.
    """
    model = model.to(device)
    if device.type == "cuda":
        options = {"device_ids": [device.index], **options}
    wrapped = DistributedDataParallel(model, **options)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    broadcast_buffers, wrapped.broadcast_buffers = wrapped.broadcast_buffers, False
    wrapped._modules["module"] = _SumOfParameters(parameters)
    try:
        for _ in range(2):
            wrapped().backward()
    finally:
        wrapped._modules["module"] = model
        wrapped.broadcast_buffers = broadcast_buffers
    for parameter in parameters:
        parameter.grad = None
    return wrapped
