"""The training of benchmarks/gpu_check.py: a small convolutional network with deterministic kernels.

Logs, in each step, the digest of the parameters as the step leaves them, and what the steps cost. With ``--hang`` the
last rank of the first attempt hangs in step 20: ``host`` in Python, ``device`` in a kernel.
"""

import argparse
import os
import threading
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import clusterddp

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--amp", choices=("float16", "bfloat16"), help="autocast; float16 with a GradScaler")
parser.add_argument("--compile", metavar="BACKEND", help="by torch.compile")
parser.add_argument("--megabytes", type=int, default=0, help="parameters that each step changes, beside the network's")
parser.add_argument("--hang", choices=("host", "device"))
options = parser.parse_args()


class Images(torch.utils.data.Dataset):
    """Noise, with augmentation from torch's generator."""

    def __len__(self):
        return 200

    def __getitem__(self, index):
        return torch.full((3, 16, 16), index / 200) + torch.randn(3, 16, 16) * 0.1, index % 10


class Net(nn.Module):
    """Convolutions, batch norm and dropout, whose kernels on GPUs are not deterministic unless they are told to be."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(4096, 10),
        )  # fmt: skip
        self.ballast = nn.Parameter(torch.ones(options.megabytes * 2**18))

    def forward(self, x):
        return self.body(x) + self.ballast.sum() * 1e-9


def digest(model):
    """The sum of all parameters' bits: one that is copied too late has another."""
    return sum(parameter.detach().view(torch.int32).sum(dtype=torch.int64) for parameter in model.parameters()).item()


def hang():
    if options.hang == "host":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    else:
        for _ in range(100):
            torch.cuda._sleep(2**40)
        torch.cuda.synchronize()


torch.use_deterministic_algorithms(True)
torch.backends.cudnn.benchmark = False
ctx = clusterddp.init(seed=1)
ones = torch.ones(1000, device=ctx.device)
dist.all_reduce(ones)
assert ones.eq(ctx.world_size).all()
ctx.print(f"backend {dist.get_backend()}, {ctx.world_size} ranks on {ctx.device.type}")
net = Net()
if options.compile:
    net.compile(backend=options.compile)
model = ctx.wrap(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
precision = getattr(torch, options.amp) if options.amp else None
scaling = precision is torch.float16
scaler = torch.amp.GradScaler(ctx.device.type, init_scale=2.0**20, growth_interval=4, enabled=scaling)
run = ctx.run(model=model, optimizer=optimizer, scaler=scaler, loader=ctx.loader(Images(), batch_size=8))
first = os.environ["CLUSTERDDP_ATTEMPT"] == "0"
ended = time.perf_counter()
for x, y in run.steps(options.steps):
    if options.hang and first and run.step == 20 and ctx.rank == ctx.world_size - 1:
        hang()
    with torch.autocast(ctx.device.type, precision, enabled=precision is not None):
        loss = F.cross_entropy(model(x.to(ctx.device)), y.to(ctx.device))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    value = digest(net)  # waits for the step's kernels, and for a copy of the state before them
    now = time.perf_counter()
    run.log(loss=loss, scale=scaler.get_scale(), digest=value, cycle_s=now - ended)
    ended = now
