"""The training of benchmarks/gpu_check: a small convolutional network with deterministic kernels.

Logs, in each step, the digest of the parameters as the step leaves them, and what the steps cost. What goes wrong does
so in one step of one attempt (``--at``, ``--attempt``), on the last rank.
"""

import argparse
import os
import signal
import threading
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import clusterddp

WRONG = ("hang-host", "hang-device", "collective", "spin", "kill", "assert", "illegal", "memory")
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--amp", choices=("float16", "bfloat16"), help="autocast; float16 with a GradScaler")
parser.add_argument("--compile", metavar="BACKEND", help="by torch.compile")
parser.add_argument("--mode", help="torch.compile's")
parser.add_argument("--fast", action="store_true", help="channels_last; fused AdamW, and a capturable Adam")
parser.add_argument("--megabytes", type=int, default=0, help="parameters that each step changes, beside the network's")
parser.add_argument("--workers", type=int, default=0, help="of the loader")
parser.add_argument("--lag", type=float, default=0.0, help="seconds by which each step delays the device")
parser.add_argument("--pace", type=float, default=0.0, help="seconds by which each step delays the host")
parser.add_argument("--hold", type=float, default=0.0, help="GB of device memory that every attempt takes")
parser.add_argument("--wrong", choices=WRONG)
parser.add_argument("--at", type=int, default=20, help="in this step")
parser.add_argument("--attempt", type=int, default=0, help="of this attempt")
parser.add_argument("--spin", type=float, default=5.0, help="seconds for which `spin` keeps the device busy")
parser.add_argument("--diverge", action="store_true", help="the last rank starts with another bias")
options = parser.parse_args()
#: Cycles of torch.cuda._sleep per second: a little less than a GPU's clock, so that it does not take longer.
HZ = 1.5e9


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
    bits = [parameter.detach().contiguous().view(torch.int32) for parameter in model.parameters()]
    return sum(one.sum(dtype=torch.int64) for one in bits) % 2**50  # run.log() has floats


def go_wrong():
    if options.wrong == "hang-host":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    elif options.wrong in ("hang-device", "collective"):
        for _ in range(100):
            torch.cuda._sleep(2**40)
        if options.wrong == "collective":
            dist.all_reduce(ones)
        torch.cuda.synchronize()
    elif options.wrong == "spin":
        torch.cuda._sleep(int(options.spin * HZ))
    elif options.wrong == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif options.wrong in ("assert", "illegal") and torch.cuda.get_device_name() == "Stand-in GPU":
        import standin_watch

        standin_watch.fail(options.wrong)
        ones.sum().item()
    elif options.wrong == "assert":
        ones[torch.tensor([2**20], device=ctx.device)].sum().item()
    elif options.wrong == "illegal":
        code = "template <typename T> T poke(T x) { volatile T* address = (volatile T*)16ull; return *address + x; }"
        torch.cuda.jiterator._create_jit_fn(code)(ones).sum().item()
    else:
        held.append(torch.empty(2**48, dtype=torch.uint8, device=ctx.device))


torch.use_deterministic_algorithms(True)
torch.backends.cudnn.benchmark = False
ctx = clusterddp.init(seed=1)
ones = torch.ones(1000, device=ctx.device)
dist.all_reduce(ones)
assert ones.eq(ctx.world_size).all()
ctx.print(f"backend {dist.get_backend()}, {ctx.world_size} ranks on {ctx.device.type}")
held = [torch.ones(10**9 // 4, device=ctx.device) for _ in range(int(options.hold))]
held.append(torch.ones(int(options.hold % 1 * 10**9 / 4), device=ctx.device))
net = Net()
if options.fast:
    net.to(memory_format=torch.channels_last)
if options.compile:
    net.compile(backend=options.compile, mode=options.mode)
model = ctx.wrap(net)
attempt = int(os.environ["CLUSTERDDP_ATTEMPT"])
if options.diverge and attempt == 0 and ctx.rank == ctx.world_size - 1:
    net.body[0].bias.data += 1
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
parts = {"optimizer": optimizer}
optimizers = [optimizer]
if options.fast:
    parameters = list(model.parameters())
    optimizers = [torch.optim.Adam(parameters[::2], capturable=True), torch.optim.AdamW(parameters[1::2], fused=True)]
    parts = {"capturable": optimizers[0], "fused": optimizers[1]}
precision = getattr(torch, options.amp) if options.amp else None
scaler = torch.amp.GradScaler(
    ctx.device.type, init_scale=2.0**20, growth_interval=4, enabled=precision is torch.float16
)
loader = ctx.loader(Images(), batch_size=8, num_workers=options.workers)
run = ctx.run(model=model, scaler=scaler, loader=loader, **parts)
ended = time.perf_counter()
for x, y in run.steps(options.steps):
    if options.wrong and run.step == options.at and attempt == options.attempt and ctx.rank == ctx.world_size - 1:
        go_wrong()
    if options.pace:
        time.sleep(options.pace)  # so that a preemption comes within a few steps
    if options.lag:
        torch.cuda._sleep(int(options.lag * HZ))
    x, y = x.to(ctx.device), y.to(ctx.device)
    if options.fast:
        x = x.to(memory_format=torch.channels_last)
    with torch.autocast(ctx.device.type, precision, enabled=precision is not None):
        loss = F.cross_entropy(model(x), y)
    for one in optimizers:
        one.zero_grad()
    scaler.scale(loss).backward()
    for one in optimizers:
        scaler.step(one)
    scaler.update()
    value = digest(net)
    if not options.lag:
        value = value.item()  # waits for the step's kernels, and for a copy of the state before them
    now = time.perf_counter()
    run.log(loss=loss, scale=scaler.get_scale(), digest=value, cycle_s=now - ended)
    ended = now
