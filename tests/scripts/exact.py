"""A small training with everything that makes an exact resume hard: the run that the resume tests stop and continue.

usage: exact.py RUN_DIR STEPS [OPTIONS]; each rank writes RUN_DIR/final-RANK.pt when all steps are done.
"""

import argparse
import contextlib
import json
import random
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import clusterddp
from clusterddp.jobdef.job import Checkpointing
from tests.stops import request_stop

parser = argparse.ArgumentParser()
parser.add_argument("run_dir", type=Path)
parser.add_argument("steps", type=int)
parser.add_argument("--batch", type=int, default=6, help="samples per rank and step")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--sleep", type=float, default=0.0, help="seconds after each step")
parser.add_argument("--every", type=int)
parser.add_argument("--samples", type=int, default=100)
parser.add_argument("--evaluate", action="store_true")
parser.add_argument("--evaluate-in-step", type=int)
parser.add_argument("--stop-in", type=int, nargs="*", default=[], help="steps in which a rank sends itself a TERM")
parser.add_argument("--micro", type=int, default=1, help="pieces of a batch whose gradients are accumulated")
parser.add_argument("--amp", choices=("float16", "bfloat16"), help="autocast; float16 with a GradScaler")
parser.add_argument("--compile", metavar="BACKEND", help="by torch.compile")
parser.add_argument("--unused", action="store_true", help="some ranks, in some steps all, use no `branch`")
parser.add_argument("--rng", default="step")
parser.add_argument("--ddp", type=json.loads, default={}, help="options of DDP, as JSON")
parser.add_argument("--plain-ddp", action="store_true", help="not by ctx.wrap()")
options = parser.parse_args()
PRECISION = getattr(torch, options.amp) if options.amp else None


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
    """1.9 MB of parameters, in two of DDP's buckets: the first takes 1 MiB."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(64, 384),
            nn.BatchNorm1d(384),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(384, 384),
            nn.ReLU(),
            nn.Linear(384, 384),
            nn.ReLU(),
        )
        self.branch = nn.Linear(384, 384)
        self.head = nn.Linear(384, 10)

    def forward(self, x, with_branch=True):
        x = self.body(x)
        return self.head(x + self.branch(x).relu() if with_branch else x)


def loss_without_training(x, y):
    """Of the bare model: BatchNorm takes the statistics that it has gathered, and nothing broadcasts them before."""
    net.eval()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(net(x), y).item()
    net.train()
    return loss.hex()


def evaluate():
    model.eval()
    right = 0
    with torch.no_grad():
        for x, y in ctx.eval_loader(Noisy(), batch_size=4):
            print("evaluation batch", flush=True)
            right += int((model(x).argmax(1) == y).sum())
            time.sleep(options.sleep)
    model.train()
    return ctx.all_reduce_sum(right) / options.samples


def gradients(x, y):
    """Accumulates those of the batch, piece by piece; the sum of the pieces' losses."""
    with_branch = not options.unused or (run.step // 2 + ctx.rank) % 5 == 0
    pieces = list(zip(x.chunk(options.micro), y.chunk(options.micro), strict=True))
    total = 0.0
    for number, (inputs, labels) in enumerate(pieces, start=1):
        with contextlib.nullcontext() if number == len(pieces) else model.no_sync():
            with torch.autocast("cpu", PRECISION, enabled=PRECISION is not None):
                loss = nn.functional.cross_entropy(model(inputs, with_branch), labels) / len(pieces)
            scaler.scale(loss).backward()
        total += loss.item()
    return total


often = Checkpointing(every_steps=options.every, every_s=None)
ctx = clusterddp.init(seed=3, run_dir=options.run_dir, checkpoint=often)
net = Net()
if options.compile:
    net.compile(backend=options.compile)
model = DistributedDataParallel(net, **options.ddp) if options.plain_ddp else ctx.wrap(net, **options.ddp)
ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=1000)
scaling = PRECISION is torch.float16
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=3, enabled=scaling)
loader = ctx.loader(Noisy(), batch_size=options.batch, num_workers=options.workers)
parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "ema": ema, "scaler": scaler}
run = ctx.run(**parts, loader=loader, rng=options.rng)
print(f"begin {run.step}", flush=True)
try:
    for x, y in run.steps(options.steps):
        if run.step in options.stop_in and run.step % ctx.world_size == ctx.rank:
            request_stop(ctx)
        before = loss_without_training(x, y)
        optimizer.zero_grad()
        loss = gradients(x, y)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        ema.update_parameters(net)
        run.log(loss=loss, scale=scaler.get_scale())
        run.log(mean_loss=torch.tensor(loss, dtype=torch.float64), reduce="mean")
        run.log(lr=scheduler.get_last_lr()[0], epoch=run.epoch)
        if run.step == options.evaluate_in_step:
            ctx.print(f"evaluating {evaluate()}")
        print(f"step {run.step} before {before} loss {loss.hex()} batch {x.double().sum().item().hex()}", flush=True)
        time.sleep(options.sleep)
finally:
    print("finally ran", flush=True)
if options.evaluate:
    ctx.print(f"evaluating {evaluate()}")
print("all done", flush=True)
state = {name: part.state_dict() for name, part in parts.items()}
torch.save(state, options.run_dir / f"final-{ctx.rank}.pt")
