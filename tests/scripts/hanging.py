"""A small training in which the last rank misbehaves: ``hanging.py HOW``, in attempt 0 at step 100 of 160.

HOW: lock (Python code waits forever), extension (C code waits forever and holds the GIL), slow (longer steps than the
others', and, inside ``ctx.unwatched()``, a pause that is longer than the watchdog's time; then work for as long), skip
(a collective that the others make), kernel (its GPU never completes one), or nothing; after a comma, that of attempt 1,
at step 130.
"""

import ctypes
import os
import sys
import threading
import time

import torch
from torch.utils.data import TensorDataset

import clusterddp

ATTEMPT = int(os.environ["CLUSTERDDP_ATTEMPT"])
HOW = dict(enumerate(sys.argv[1].split(","))).get(ATTEMPT, "nothing")
STEP = 100 + 30 * ATTEMPT
PAUSE_S = 6


def evaluate(until):
    """Works for longer than the watchdog's time, without a step's end."""
    values = torch.ones(100)
    while time.monotonic() < until:
        for _ in range(1000):
            values = values * 1.0
            values = values + 0.0


def misbehave():
    """What only the last rank does."""
    if HOW == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    elif HOW == "extension":
        ctypes.PyDLL(None).sleep(600)
    elif HOW == "slow":
        with ctx.unwatched():
            time.sleep(PAUSE_S)
        evaluate(until=time.monotonic() + PAUSE_S)


ctx = clusterddp.init()
odd = ctx.rank == ctx.world_size - 1
model = ctx.wrap(torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = ctx.loader(TensorDataset(torch.arange(3200.0).reshape(200, 16) / 3200), batch_size=4)
run = ctx.run(model=model, optimizer=optimizer, loader=loader)
for (x,) in run.steps(160):
    if odd and run.step == STEP:
        misbehave()
    time.sleep((0.08 if odd else 0.005) if HOW == "slow" else 0.03)
    loss = model(x).square().mean()
    optimizer.zero_grad()
    gradient = torch.ones_like(loss)  # backward() would make it, and wait there for a stand-in device
    if HOW == "kernel" and odd and run.step == STEP:
        torch.cuda._sleep(10**18)
    loss.backward(gradient)
    optimizer.step()
    if HOW == "skip" and not (odd and run.step == STEP):
        torch.distributed.barrier()
    run.log(loss=loss)
