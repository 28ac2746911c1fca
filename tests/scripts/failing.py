"""A small training in which ranks fail in attempt 0: ``failing.py HOW RANK...``, at step 5 of 8.

HOW: raise, worker (an exception in a DataLoader's worker), segfault, abort, exit (by os._exit), leave (with code 0),
break (out of the loop), memory (more than there is), or nothing.
"""

import ctypes
import os
import resource
import sys

import torch
from torch.utils.data import Dataset

import clusterddp
from tests.descent import Descent

HOW, RANKS = sys.argv[1], [int(rank) for rank in sys.argv[2:]]


class Samples(Dataset):
    """200 of them; one read by a worker of a rank that is to fail has an end."""

    def __len__(self):
        return 200

    def __getitem__(self, index):
        if HOW == "worker" and odd and torch.utils.data.get_worker_info() is not None:
            raise ValueError(f"bad sample {index}")
        return torch.full((16,), index / 200)


def fail():
    """What only these ranks of the first attempt do."""
    if HOW == "raise":
        raise ValueError(f"bad label on rank {ctx.rank}")
    if HOW == "segfault":
        ctypes.string_at(0)
    if HOW == "abort":
        os.abort()
    if HOW == "leave":
        sys.exit(0)
    if HOW == "exit":
        os._exit(3)
    if HOW == "memory":
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28), resource.RLIM_INFINITY))
        torch.empty(1 << 30)


ctx = clusterddp.init()
odd = ctx.rank in RANKS and os.environ["CLUSTERDDP_ATTEMPT"] == "0"
model = torch.nn.Linear(16, 1)
optimizer = Descent(model, lr=0.1)
loader = ctx.loader(Samples(), batch_size=4, num_workers=1 if HOW == "worker" else 0)
run = ctx.run(model=model, optimizer=optimizer, loader=loader)
for x in run.steps(8):
    if odd and run.step == 5:
        if HOW == "break":
            break
        fail()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    run.log(loss=loss)
