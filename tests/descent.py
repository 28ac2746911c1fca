"""Gradient descent for scripts of tests that are not about DDP or torch.optim.

Those import torch._dynamo, which takes a rank as much CPU time as importing torch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Descent:
    """SGD with momentum on the mean of all ranks' gradients; all ranks begin with rank 0's weights."""

    def __init__(self, model: torch.nn.Module, lr: float = 1e-2) -> None:
        self._parameters, self._lr = list(model.parameters()), lr
        self._velocities = [torch.zeros_like(parameter) for parameter in self._parameters]
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        for parameter in self._parameters if self._ranks > 1 else ():
            dist.broadcast(parameter.data, 0)

    @torch.no_grad()
    def step(self) -> None:
        """Uses up the gradients."""
        for parameter, velocity in zip(self._parameters, self._velocities, strict=True):
            assert parameter.grad is not None
            if self._ranks > 1:
                dist.all_reduce(parameter.grad)
            velocity.mul_(0.9).add_(parameter.grad, alpha=1 / self._ranks)
            parameter.sub_(velocity, alpha=self._lr)
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"velocities": self._velocities}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._velocities = state["velocities"]
