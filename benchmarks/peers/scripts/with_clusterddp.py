"""clusterddp: docs/guide/first-run.md."""

import torch
import torch.nn.functional as F
from common import BATCH, LR, STEPS, Net, train_set
from steplog import finish, steplog

import clusterddp

ctx = clusterddp.init()
model = ctx.wrap(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
loader = ctx.loader(train_set, batch_size=BATCH)
run = ctx.run(model=model, optimizer=optimizer, loader=loader)
for images, labels in run.steps(STEPS):
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    steplog(run.step)
finish(model.module)
