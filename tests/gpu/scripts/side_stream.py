"""Steps on a stream of its own, where copies are late, and is saved after each step: side_stream.py RUN_DIR"""

import sys

import torch

import clusterddp
from clusterddp.jobdef.job import Checkpointing, Keep

SHAPE = 64, 64


class Copied(torch.optim.Optimizer):
    """Sets the weight to the step's number, by copies of which its stream does the last after those of a save."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.values = [torch.full(SHAPE, float(number)).pin_memory() for number in range(1, 5)]

    def step(self):
        value = self.values.pop(0)
        with torch.no_grad():
            for _ in range(4):
                self.param_groups[0]["params"][0].copy_(value, non_blocking=True)


ctx = clusterddp.init(run_dir=sys.argv[1], checkpoint=Checkpointing(every_steps=1, keep=Keep(last=4)))
model = torch.nn.Linear(*SHAPE, bias=False, device=ctx.device)
optimizer = Copied(model.parameters())
stream = torch.cuda.Stream()
stream.wait_stream(torch.cuda.current_stream())
for _ in ctx.run(model=model, optimizer=optimizer).steps(4):
    with torch.cuda.stream(stream):
        optimizer.step()
