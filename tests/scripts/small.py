"""A few steps under any launcher: ``small.py RUN_DIR STEPS``. Prints where it resumed, and its rank."""

import argparse

import torch
from torch.utils.data import TensorDataset

import clusterddp

parser = argparse.ArgumentParser()
parser.add_argument("run_dir")
parser.add_argument("steps", type=int)
parser.add_argument("--local-rank", "--local_rank", type=int, help="as torch.distributed.launch gives it; not needed")
args = parser.parse_args()

ctx = clusterddp.init(device="cpu", run_dir=args.run_dir)
model = ctx.wrap(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = ctx.loader(TensorDataset(torch.randn(64, 4)), batch_size=4)
run = ctx.run(model=model, optimizer=optimizer, loader=loader)
print(f"rank {ctx.rank} of {ctx.world_size}, local {ctx.local_rank}, from step {run.step}\n", end="", flush=True)
for (x,) in run.steps(args.steps):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    run.log(loss=loss)
