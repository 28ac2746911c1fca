"""A straggler and the process group's timeout: the last rank is late for every gradient reduction.

The other ranks wait for it, mostly in the backward pass. While ``timeouts.step_s`` is longer than the wait, training
continues at the pace of the slowest rank. When a rank has waited longer, its collective fails and the attempt ends: a
short timeout treats a slow rank (a cold cache, an evaluation on rank 0, a large file) as a dead one. The first step has
``timeouts.start_s``, which covers imports and compilation.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import clusterddp


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--late", type=float, default=3.0, help="seconds that the last rank loses in each step")
    args = parser.parse_args()

    ctx = clusterddp.init()
    dataset = TensorDataset(torch.randn(1000, 10), torch.randn(1000, 5))
    model = ctx.wrap(torch.nn.Linear(10, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = ctx.run(model=model, optimizer=optimizer, loader=ctx.loader(dataset, batch_size=20))
    for inputs, targets in run.steps(args.steps):
        if ctx.rank == ctx.world_size - 1:
            time.sleep(args.late)
        begun = time.perf_counter()
        loss = F.mse_loss(model(inputs.to(ctx.device)), targets.to(ctx.device))
        optimizer.zero_grad()
        loss.backward()
        loss = loss.item()  # on a GPU, only this waits for the other ranks
        waited = ctx.gather(torch.tensor([time.perf_counter() - begun])).tolist()
        optimizer.step()
        run.log(loss=loss)
        ctx.print(f"step {run.step} took " + ", ".join(f"{s:.1f} s (rank {rank})" for rank, s in enumerate(waited)))
    ctx.print(f"all {args.steps} steps are done, at the slowest rank's pace")


if __name__ == "__main__":
    main()
