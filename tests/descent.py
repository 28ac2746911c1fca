"""Gradient descent for scripts of tests that are not about DDP or torch.optim.

Those import torch._dynamo, which takes a rank as much CPU time as importing torch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Descent:
    """Updates a model by the mean of all ranks' gradients."""

    def __init__(self, model: torch.nn.Module, lr: float = 1e-3) -> None:
        self._model, self._lr = model, lr

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self._model.parameters():
            assert parameter.grad is not None
            if dist.is_initialized():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            parameter.sub_(parameter.grad, alpha=self._lr)
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is restored."""
