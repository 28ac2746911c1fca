"""Trains on batches of pinned memory, logs values of the device, and saves every few steps: lagging.py RUN_DIR STEPS

Nothing in a step of this script waits for the device. In attempt 1, rank 1 is killed in step 9.
"""

import os
import signal
import sys

import torch
from torch import nn

import clusterddp
from clusterddp.jobdef.job import Checkpointing, Keep

IMAGES = torch.utils.data.TensorDataset(
    torch.randn(48, 1, 6, 6, generator=torch.Generator().manual_seed(1)), torch.arange(48) % 4
)
ctx = clusterddp.init(run_dir=sys.argv[1], checkpoint=Checkpointing(every_steps=2, keep=Keep(20)))
torch.manual_seed(3)
net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 4 * 4, 4))
model = ctx.wrap(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
workers = {"num_workers": 1} if ctx.rank == 0 else {}
run = ctx.run(model=model, optimizer=optimizer, loader=ctx.loader(IMAGES, batch_size=4, **workers))


def step(x, y):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    run.log(loss=loss, first=x.flatten()[0])
    run.log(mean=loss, reduce="mean")


for x, y in run.steps(int(sys.argv[2])):
    if ctx.attempt == 1 and ctx.rank == 1 and run.step == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    if ctx.attempt == 0 and run.step == 4 and ctx.device.type == "cuda":
        run.stop("saved")
    step(x, y)
    del x, y
