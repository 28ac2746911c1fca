"""A small training whose rank keeps two thirds of its device's memory."""

import torch
from torch.utils.data import TensorDataset

import clusterddp

ctx = clusterddp.init()
model = ctx.wrap(torch.nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
held = torch.empty(2 * torch.cuda.mem_get_info(ctx.device)[1] // 3, dtype=torch.uint8, device=ctx.device)
samples = TensorDataset(torch.linspace(0, 1, 3200).reshape(200, 16))
run = ctx.run(model=model, optimizer=optimizer, loader=ctx.loader(samples, batch_size=4))
for (x,) in run.steps(60):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    run.log(loss=loss.detach())
