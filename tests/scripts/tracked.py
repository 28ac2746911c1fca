"""Logs the attempt in each step: ``tracked.py STEPS KILLED AT``.

In attempt KILLED rank 0 is killed in step AT, once all steps before are in TensorBoard's file.
"""

import os
import signal
import sys
import time

import torch
from torch.utils.data import TensorDataset

import clusterddp
from tests.descent import Descent

steps, killed, at = map(int, sys.argv[1:4])
ctx = clusterddp.init()
model = torch.nn.Linear(4, 1)
optimizer = Descent(model)
loader = ctx.loader(TensorDataset(torch.randn(64, 4)), batch_size=4)
run = ctx.run(model=model, optimizer=optimizer, loader=loader)
begun = run.step
for (x,) in run.steps(steps):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    run.log(loss=loss, by=ctx.attempt)
    time.sleep(0.02)
    if (ctx.attempt, run.step) == (killed, at):
        written = f"tensorboard/*.attempt-{killed}"
        while sum(path.read_bytes().count(b"loss") for path in ctx.run_dir.glob(written)) < at - begun:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
run.log(final=1.5)
