"""Keeps the best checkpoint by a metric on the device, or starts from weights: best.py RUN_DIR [FILE]"""

import sys

import torch

import clusterddp
from clusterddp.jobdef.job import Checkpointing, Keep

keep = Checkpointing(every_steps=1, keep=Keep(last=1, best="accuracy"))
ctx = clusterddp.init(run_dir=sys.argv[1], checkpoint=keep)
model = ctx.wrap(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = ctx.run(model=model, optimizer=optimizer, init_from=sys.argv[2] if sys.argv[2:] else None)
print("weight", model.module.weight.tolist(), flush=True)
accuracies = torch.tensor([0.1, 0.9, 0.5, 0.7], device=ctx.device)
for step in run.steps(4):
    model(torch.ones(1, 4, device=ctx.device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    run.log(accuracy=accuracies[step])
