"""As a GAN: two optimizers of which one steps twice, and a learning rate by the step. Rank 1 hangs once.

The arguments: the number of steps, and the step of the first attempt in which rank 1 hangs.
"""

import os
import sys
import threading

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main():
    steps, hangs_in = int(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    generator, critic = (DistributedDataParallel(torch.nn.Linear(4, 4)) for _ in range(2))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (critic, generator)]
    for step in range(steps):
        for optimizer, model in zip([optimizers[0], *optimizers], (critic, critic, generator), strict=True):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).mean().backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"Epoch 0, step: {step + 1}/{steps}", file=sys.stderr, flush=True)
        elif step == hangs_in and os.environ["CLUSTERDDP_ATTEMPT"] == "0":
            threading.Event().wait()
    dist.destroy_process_group()


main()
