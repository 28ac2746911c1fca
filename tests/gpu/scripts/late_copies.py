"""Saves once, with late copies, and continues when the checkpoint is committed: late_copies.py RUN_DIR"""

import sys
import time

import torch

import clusterddp
from clusterddp.jobdef.job import Checkpointing

ctx = clusterddp.init(run_dir=sys.argv[1], checkpoint=Checkpointing(every_steps=5))
model = ctx.wrap(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in ctx.run(model=model, optimizer=optimizer).steps(8):
    optimizer.step()
    while step == 5 and not list((ctx.run_dir / "checkpoints").glob("step-*")):
        time.sleep(0.01)
