"""A small training with everything that makes an exact resume hard: the run that the resume tests stop and continue.

usage: exact.py RUN_DIR STEPS [OPTIONS]; writes RUN_DIR/weights.pt when all steps are done.
"""

import argparse
import random
import time
from pathlib import Path

import torch
from torch import nn

import clusterddp
from clusterddp.job import Checkpointing

parser = argparse.ArgumentParser()
parser.add_argument("run_dir", type=Path)
parser.add_argument("steps", type=int)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--sleep", type=float, default=0.0)
parser.add_argument("--every", type=int)
parser.add_argument("--samples", type=int, default=100)
parser.add_argument("--evaluate", action="store_true")
parser.add_argument("--evaluate-in-step", type=int)
options = parser.parse_args()


class Noisy(torch.utils.data.Dataset):
    """Samples with augmentation from torch's and Python's generators."""

    def __len__(self):
        return options.samples

    def __getitem__(self, index):
        sample = torch.full((64,), float(index) / 100) + torch.randn(64) * 0.1
        if random.random() < 0.5:
            sample = sample.flip(0)
        return sample, index % 10


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 512),
            nn.BatchNorm1d(512),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Linear(512, 10),
        )

    def forward(self, x):
        return self.layers(x)


def evaluate(ctx, model):
    model.eval()
    right = 0
    with torch.no_grad():
        for x, y in ctx.eval_loader(Noisy(), batch_size=4):
            print("evaluation batch", flush=True)
            right += int((model(x).argmax(1) == y).sum())
            time.sleep(options.sleep)
    model.train()
    return ctx.all_reduce_sum(right) / options.samples


often = Checkpointing(every_steps=options.every, every_s=None)
ctx = clusterddp.init(seed=3, run_dir=options.run_dir, checkpoint=often)
model = ctx.wrap(Net(), bucket_cap_mb=0.2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=1000)
loader = ctx.loader(Noisy(), batch_size=6, num_workers=options.workers)
run = ctx.run(model=model, optimizer=optimizer, loader=loader, scheduler=scheduler)
print(f"begin {run.step}", flush=True)
try:
    for x, y in run.steps(options.steps):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        run.log(loss=loss)
        run.log(lr=scheduler.get_last_lr()[0], epoch=run.epoch)
        if run.step == options.evaluate_in_step:
            ctx.print(f"evaluating {evaluate(ctx, model)}")
        print(f"step {run.step} sum {int(x.sum() * 1000)}", flush=True)
        time.sleep(options.sleep)
finally:
    print("finally ran", flush=True)
if options.evaluate:
    ctx.print(f"evaluating {evaluate(ctx, model)}")
print("all done", flush=True)
if ctx.is_main:
    torch.save(model.module.state_dict(), options.run_dir / "weights.pt")
