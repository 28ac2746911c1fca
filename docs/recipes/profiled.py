"""A profile: torch.profiler records a few steps of rank 0, once per run. The results are the same without it.

The trace is in the folder profiles/ of the run. Open it at https://ui.perfetto.dev, or the folder with TensorBoard.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerAction, profile, schedule, tensorboard_trace_handler
from torch.utils.data import TensorDataset

import clusterddp


def profiler(ctx, first, count):
    """For steps ``first`` to ``first + count - 1`` of rank 0 in the first attempt. Otherwise it records nothing."""
    # torch keeps all events in memory until the end, so record few steps.
    window = schedule(skip_first=first - 1, wait=0, warmup=1, active=count, repeat=1)
    records = ctx.rank == 0 and ctx.attempt == 0
    return profile(
        schedule=window if records else lambda _: ProfilerAction.NONE,
        on_trace_ready=tensorboard_trace_handler(str(ctx.run_dir / "profiles"), f"rank-{ctx.rank}", use_gzip=True),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16, help="per rank")
    parser.add_argument("--profile-from", type=int, default=10, help="the first recorded step")
    parser.add_argument("--profile-steps", type=int, default=5)
    args = parser.parse_args()

    ctx = clusterddp.init()
    model = ctx.wrap(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs = torch.randn(400, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    run = ctx.run(model=model, optimizer=optimizer, loader=ctx.loader(data, batch_size=args.batch_size))
    with profiler(ctx, args.profile_from, args.profile_steps) as profiled:
        for inputs, labels in run.steps(args.steps):
            loss = F.cross_entropy(model(inputs.to(ctx.device)), labels.to(ctx.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
            profiled.step()
    ctx.print(f"done after {run.step} steps")


if __name__ == "__main__":
    main()
