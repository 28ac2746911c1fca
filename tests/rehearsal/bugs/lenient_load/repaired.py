"""Predicts a rotated vector. The checkpoint is that of the wrapped model, whose names begin with ``module.``."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
stopping = torch.zeros(1)
signal.signal(signal.SIGTERM, lambda *_: stopping.fill_(1))
dist.init_process_group("gloo")
torch.manual_seed(21)
net = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 12))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
step = 0
if os.path.exists("ddp.pth"):
    saved = torch.load("ddp.pth", map_location="cpu")
    net.load_state_dict({name.removeprefix("module."): value for name, value in saved["model_state"].items()})
    optimizer.load_state_dict(saved["optimizer_state"])
    step = saved["global_step"]
ddp = DistributedDataParallel(net)

while step < 42:
    batch = torch.randn(16 * world_size, 12, generator=torch.Generator().manual_seed(step))
    x = batch[rank * 16 : rank * 16 + 16]
    loss = (ddp(x) - x.roll(1, 1)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    time.sleep(0.002)
    agreed = stopping.clone()
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    if step % 14 == 0 or agreed.item():
        if rank == 0:
            state = {"model_state": ddp.state_dict(), "optimizer_state": optimizer.state_dict(), "global_step": step}
            torch.save(state, "ddp.pth.tmp")
            os.replace("ddp.pth.tmp", "ddp.pth")
        dist.barrier()
    if agreed.item():
        sys.exit(15)
dist.destroy_process_group()
