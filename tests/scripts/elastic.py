"""A training for any number of ranks: no BatchNorm, no dropout, the batch in pieces.

Rank 0 logs the loss over the global batch, and appends each step's samples to RUN_DIR/samples.jsonl.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import nn

import clusterddp
from tests.stops import request_stop

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=120)
parser.add_argument("--batch-size", type=int, default=6)
parser.add_argument("--pause", type=float, default=0.0, help="seconds in each step")
parser.add_argument("--stops", default="", help="the step in which attempt 0 asks for a stop, attempt 1, and so on")
parser.add_argument("--whole", action="store_true", help="without run.micro()")
args = parser.parse_args()

STOPS = dict(enumerate(int(step) for step in args.stops.split(",") if step))
RUN, ATTEMPT = Path(os.environ["CLUSTERDDP_RUN_DIR"]), int(os.environ["CLUSTERDDP_ATTEMPT"])


class Waves(torch.utils.data.Dataset):
    """100 samples, and their index."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        x = torch.linspace(0, 1 + index / 10, 16).sin() + 0.1 * torch.randn(16)
        return x, x.sum().cos(), index


ctx = clusterddp.init()
model = ctx.wrap(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = ctx.loader(Waves(), args.batch_size)
run = ctx.run(model=model, optimizer=optimizer, loader=loader)
for batch in run.steps(args.steps):
    total = 0.0
    for x, y, _ in [batch] if args.whole else run.micro(batch):
        assert args.whole or len(x) <= args.batch_size
        loss = (model(x).squeeze(1) - y).square().mean()
        loss.backward()
        total += loss.item() * len(x)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    run.log(loss=ctx.all_reduce_sum(total) / loader.global_batch)
    taken = ctx.gather(batch[2]).tolist()
    if ctx.is_main:
        with open(RUN / "samples.jsonl", "a") as file:
            file.write(json.dumps(taken) + "\n")
    if run.step == STOPS.get(ATTEMPT):
        request_stop(ctx)
    time.sleep(args.pause)
