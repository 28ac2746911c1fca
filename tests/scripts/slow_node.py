"""A small training that is slow on one node: ``slow_node.py STEPS NODE``. Steps take 20 ms, and 60 ms on the node."""

import os
import sys
import time

import torch
from torch.utils.data import TensorDataset

import clusterddp

steps, slow = int(sys.argv[1]), sys.argv[2] == os.environ["SLURMD_NODENAME"]
ctx = clusterddp.init()
model = ctx.wrap(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = ctx.loader(TensorDataset(torch.randn(64, 4)), batch_size=4)
run = ctx.run(model=model, optimizer=optimizer, loader=loader)
for (x,) in run.steps(steps):
    time.sleep(0.06 if slow else 0.02)
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    run.log(loss=loss)
