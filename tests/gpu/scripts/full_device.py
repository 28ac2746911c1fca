"""A run whose devices have no memory left when it is preempted in its second step: full_device.py STEPS

Each rank has state of its own, gradients that differ between the ranks and wait for their optimizer, and a model in
channels_last.
"""

import sys

import torch
from torch import nn

import clusterddp


class Own:
    """A rank's own state, on its device."""

    def __init__(self):
        self.values = torch.zeros(100, device=ctx.device) + ctx.rank

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state):
        self.values = state["values"].to(ctx.device)


ctx = clusterddp.init()
torch.manual_seed(4)
net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 4 * 4, 2))
model = ctx.wrap(net.to(memory_format=torch.channels_last))
optimizer = torch.optim.Adam(model.parameters())
own = Own()
images = torch.utils.data.TensorDataset(torch.randn(16, 3, 6, 6))
run = ctx.run(model=model, optimizer=optimizer, per_rank=own, loader=ctx.loader(images, batch_size=2))
for (x,) in run.steps(int(sys.argv[1])):
    if run.step % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
    with model.no_sync():
        loss = model(x).square().mean()
        loss.backward()
    own.values += x.sum()
    run.log(loss=loss, own=own.values[0])
    if run.step == 1 and ctx.attempt == 0 and ctx.run_dir.name == "preempted":
        free, _ = torch.cuda.mem_get_info()
        hog = torch.empty(free, dtype=torch.uint8, device=ctx.device)
