"""Prints how many steps the host is ahead of its device at most: ahead.py RUN_DIR default|own

The device is slow, and nothing in the script waits for it. With ``own``, the optimizer steps on the script's stream.
"""

import contextlib
import sys

import torch

import clusterddp

STEPS = 12


class Slow(torch.optim.Optimizer):
    """A step is time on the device, as it would be in one CUDA graph."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        torch.cuda._sleep(int(0.05e9))


ctx = clusterddp.init(run_dir=sys.argv[1])
model = torch.nn.Linear(2, 2, device=ctx.device)
optimizer = Slow(model.parameters())
stream = torch.cuda.Stream()
ends, ahead = [], []
for _ in ctx.run(model=model, optimizer=optimizer).steps(STEPS):
    ahead.append(sum(not end.query() for end in ends))
    with torch.cuda.stream(stream) if sys.argv[2] == "own" else contextlib.nullcontext():
        optimizer.step()
        ends.append(torch.cuda.current_stream().record_event())
print("ahead", max(ahead))
