"""A run whose dataset, collate_fn and steps draw on the last device that they see: draws.py STEPS

Loaded without workers, by ctx.loader or, with OWN in the environment, by a loader without a state.
"""

import os
import sys

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

import clusterddp


class Noisy(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.rand(4, device=last) + index


def collate(samples):
    return default_collate(samples) + torch.rand(1, device=last)


ctx = clusterddp.init()
last = torch.device("cuda", torch.cuda.device_count() - 1)
model = ctx.wrap(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
own = "OWN" in os.environ
loader = (DataLoader if own else ctx.loader)(Noisy(), batch_size=1, collate_fn=collate)
run = ctx.run(model=model, optimizer=optimizer, loader=loader)
for batch in run.steps(int(sys.argv[1])):
    loss = model(batch.to(ctx.device)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    run.log(loss=loss, batch=batch.sum(), drawn=torch.rand(1, device=last))
