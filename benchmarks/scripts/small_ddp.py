"""A short DDP training of a small model: each rank prints how many sockets it has, and its peak memory at the end."""

import os
import resource
import time

import torch

import clusterddp

ctx = clusterddp.init()
model = ctx.wrap(torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.ones(4096, 64), torch.ones(4096, 1))
run = ctx.run(model=model, optimizer=optimizer, loader=ctx.loader(data, batch_size=4))
for samples, targets in run.steps(120):
    loss = (model(samples) - targets).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    run.log(loss=loss, reduce="mean")
    time.sleep(0.02)
links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
print("sockets", sum(os.path.islink(link) and os.readlink(link).startswith("socket") for link in links), flush=True)
print("peak_mb", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, flush=True)
