"""checkpoint.py with clusterddp.CheckpointFolder, in a custom training loop: a preemption repeats no steps.

Files are written in the background and verified, the newest three are kept, and rank 0 restores them for all ranks.
``ctx.run()`` does all of this in a loop that clusterddp drives: see digits.py.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F

import clusterddp


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--folder", help="where to save (default: own/ in the run directory)")
    args = parser.parse_args()

    ctx = clusterddp.init()
    model = ctx.wrap(torch.nn.Linear(10, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with clusterddp.CheckpointFolder(args.folder or (ctx.run_dir or Path()) / "own") as folder:
        first = folder.restore(model=model, optimizer=optimizer)
        print(f"rank {ctx.rank} starts at step {first}", flush=True)
        for step in range(first, args.steps):
            data = torch.Generator().manual_seed(1000 * step + ctx.rank)  # a step's data, the same after a restart
            inputs, targets = torch.randn(20, 10, generator=data), torch.randn(20, 5, generator=data)
            loss = F.mse_loss(model(inputs.to(ctx.device)), targets.to(ctx.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            stop = clusterddp.stop_requested()
            if stop or (step + 1) % args.save_every == 0 or step + 1 == args.steps:
                folder.save(step + 1, model=model, optimizer=optimizer)
            if stop:
                folder.wait()
                clusterddp.requeue()
    print(f"rank {ctx.rank} is done: weights sum to {sum(p.sum() for p in model.parameters()):.6f}", flush=True)


if __name__ == "__main__":
    main()
