"""A training whose arithmetic is exact in float32, so that every machine and every torch computes the same bits.

Weights, gradients and factors are multiples of powers of two, few enough steps for 24 bits.

usage: train.py STEPS [FOLDER]; with a folder, by CheckpointFolder, else as a run.
"""

from __future__ import annotations

import os
import random
import sys
import time
from typing import Any

import torch

import clusterddp

total, folder = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None
ctx = clusterddp.init(device="cpu")
model = torch.nn.Linear(3, 1, bias=False)
torch.nn.init.constant_(model.weight, 1.0)
model = ctx.wrap(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=1.0)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)


def step(x: Any) -> Any:
    noise = torch.randint(-2, 3, x.shape).float()
    loss = (model(x + noise) / 64).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    time.sleep(float(os.environ.get("PAUSE_S", "0")))
    return loss


if folder is None:
    loader = ctx.loader(torch.utils.data.TensorDataset(torch.arange(96.0).reshape(32, 3) % 7), batch_size=4)
    run = ctx.run(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    for (x,) in run.steps(total):
        run.log(loss=step(x), drawn=random.getrandbits(30))
else:
    checkpoints = clusterddp.CheckpointFolder(folder)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    for made in range(checkpoints.restore(**parts), total):
        torch.manual_seed(made)
        step(torch.full((4, 3), made % 7.0))
        checkpoints.save(made + 1, **parts)
    checkpoints.close()
