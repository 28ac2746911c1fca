"""The results of jobs/checkpoint.py and model_parallel.py, trained in this process without DDP."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def trained_alone(model: torch.nn.Module, steps: int, ranks: int, momentum: float = 0.0) -> float:
    """Trains on the joined batches of so many ranks, as these jobs make them; the last loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    for step in range(steps):
        seeds = [torch.Generator().manual_seed(1000 * step + rank) for rank in range(ranks)]
        pairs = [(torch.randn(20, 10, generator=seed), torch.randn(20, 5, generator=seed)) for seed in seeds]
        inputs, targets = (torch.cat(column) for column in zip(*pairs, strict=True))
        loss = F.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()
