"""What a step and a save cost beside the least that does the same, on GPUs (or, as a dry run, on CPUs).

``gpu_costs.py FILE --megabytes N``, under ``submit --local``: rank 0 writes FILE, lists of seconds in pairs. "step":
blocks of steps of a model with 1,000 parameters in the loop of ctx.run, of DDP alone, and of the model without DDP.
The last two get their batches from torch's DataLoader, and all copy each to the device once. "stall": how long a save
keeps the CPU, and copies of as many tensors into pinned memory that are only queued. "copies": the same until they are
complete.
"""

import argparse
import itertools
import json
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import clusterddp
from clusterddp.checkpoint.client import Snapshot
from clusterddp.checkpoint.packing import Packed

parser = argparse.ArgumentParser()
parser.add_argument("file", type=Path)
parser.add_argument("--megabytes", type=int, default=256)
parser.add_argument("--pairs", type=int, default=20)
parser.add_argument("--block", type=int, default=20, help="steps")
options = parser.parse_args()
ctx = clusterddp.init(seed=1)
cuda = ctx.device.type == "cuda"
WIDTH, LAYERS = 128, 500  # two parameters each


def net():
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(ctx.device)


def synchronize():
    if cuda:
        torch.cuda.synchronize()


def timed(work):
    """Seconds until the work is done, and until all that it has queued is."""
    synchronize()
    started = time.perf_counter()
    work()
    queued = time.perf_counter() - started
    synchronize()
    return queued, time.perf_counter() - started


def trains(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(x):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, optimizer


model = ctx.wrap(net())
step, optimizer = trains(model)
data = torch.utils.data.TensorDataset(torch.randn(64 * 32 * ctx.world_size, WIDTH))
run = ctx.run(model=model, optimizer=optimizer, loader=ctx.loader(data, batch_size=64))
batches = run.steps((options.pairs + 1) * options.block + 1)
bare = net()
others = {"DDP": trains(DistributedDataParallel(net())), "bare": trains(bare)}


def endless():
    """Batches as of the loop of ctx.run, from a loop as in torch's DDP tutorial."""
    sampler = DistributedSampler(data, ctx.world_size, ctx.rank)
    loader = DataLoader(data, 64, sampler=sampler, drop_last=True, pin_memory=cuda)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


plain_batches = endless()


def ours():
    for _ in range(options.block):
        (x,) = next(batches)
        step(x.to(ctx.device))


def least(other):
    for _ in range(options.block):
        (x,) = next(plain_batches)
        other(x.to(ctx.device, non_blocking=True))


found = {"step": {"ours": [], **{name: [] for name in others}}, "stall": {"ours": [], "pinned": []}}
found["copies"] = {"ours": [], "pinned": []}
works = {"ours": ours, **{name: (lambda other=other: least(other)) for name, (other, _) in others.items()}}
for number in range(options.pairs + 1):
    order = [*works] if number % 2 else [*works][::-1]
    for name in order:
        _, seconds = timed(works[name])
        if number:  # the first block is not like the others
            found["step"][name].append(seconds / options.block)

# A state of so many megabytes, as a snapshot of it is taken, and as torch copies it into its own pinned memory.
tensors = [torch.randn(options.megabytes * 2**18 // 64, device=ctx.device) for _ in range(64)]
if ctx.rank == 0:
    snapshot = Snapshot(ctx.device, options.file.parent)
    pinned = [torch.empty(tensor.shape, pin_memory=cuda) for tensor in tensors]
    content = {"tensors": tensors}

    def save():
        snapshot.take(Packed(content))

    def copy():
        torch._foreach_copy_(pinned, tensors, non_blocking=cuda)

    for number in range(options.pairs + 1):
        for name, work in (("ours", save), ("pinned", copy)) if number % 2 else (("pinned", copy), ("ours", save)):
            queued, complete = timed(work)
            if number:
                found["stall"][name].append(queued)
                found["copies"][name].append(complete)
    snapshot.wait()
    found["pinned"] = cuda and torch.frombuffer(snapshot._map, dtype=torch.uint8).is_pinned()
    options.file.write_text(json.dumps(found))
for _ in batches:  # to the end, so that the run completes
    pass
