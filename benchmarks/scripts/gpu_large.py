"""A large state of many tensors: what its saves and its restore cost beside torch.save and torch.load.

``gpu_large.py FOLDER --gigabytes G --tensors N``: under ``submit --local``, preempted once. Each attempt writes
FOLDER/attempt-N.json: times in seconds, memory in bytes.
"""

import argparse
import json
import os
import threading
import time
from pathlib import Path

import torch
from torch import nn

import clusterddp

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--gigabytes", type=float, default=20.0)
parser.add_argument("--tensors", type=int, default=3000)
parser.add_argument("--steps", type=int, default=16)
parser.add_argument("--save-at", type=int, default=4, help="the steps between saves")
options = parser.parse_args()


class Memory(threading.Thread):
    """The most memory of this process that is no file's: its own, and shared memory."""

    def __init__(self):
        super().__init__(daemon=True)
        self.most = 0
        self.start()

    def run(self):
        while True:
            self.most = max(self.most, now())
            time.sleep(0.02)

    def since(self, before):
        return max(self.most, now()) - before

    def begin(self):
        self.most = now()
        return self.most


def now():
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        size = int(options.gigabytes * 1e9 / 4 / options.tensors)
        self.parts = nn.ParameterList(nn.Parameter(torch.full((size,), 1.0 + i)) for i in range(options.tensors // 3))

    def forward(self, x):
        return torch.stack([part.sum() for part in self.parts]).sum() * 1e-9 + x.sum()


def digest(net):
    sums = [part.detach().view(torch.int32).sum(dtype=torch.int64) for part in net.parameters()]
    return torch.stack(sums).sum().item() % 2**50


memory, found = Memory(), {}
ctx = clusterddp.init(seed=1)
attempt = int(os.environ["CLUSTERDDP_ATTEMPT"])
with torch.device(ctx.device):
    net = Net()
model = ctx.wrap(net, gradient_as_bucket_view=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
loader = ctx.loader(data, batch_size=4)
torch.cuda.synchronize()
before, began = memory.begin(), time.perf_counter()
run = ctx.run(model=model, optimizer=optimizer, loader=loader)
torch.cuda.synchronize()
found["run_s"], found["run_bytes"] = time.perf_counter() - began, memory.since(before)
found["digest"], found["step"] = digest(net), run.step
boundaries, ends, stamps = [], [], []
before, ended = memory.begin(), None
for (x,) in run.steps(options.steps):
    started = torch.cuda.Event(enable_timing=True)
    started.record()
    if ended is not None:  # from the end of the step before to the start of this one: the step boundary
        boundaries.append((run.step, time.perf_counter() - ended))
        ends.append((stamps[-1], started))
    if attempt == 0 and run.step == 1:  # such short steps would have the first save wait for its memory
        prepared = time.monotonic()
        while memory.since(before) < options.gigabytes * 1e9 and time.monotonic() < prepared + 120:
            time.sleep(0.1)
        time.sleep(1 + options.gigabytes / 10)  # until it is pinned
        found["prepare_s"] = time.monotonic() - prepared
    model(x).backward()
    optimizer.step()
    optimizer.zero_grad()
    run.log(digest=digest(net))
    torch.cuda.synchronize()
    stamps.append(torch.cuda.Event(enable_timing=True))
    stamps[-1].record()
    if attempt == 0 and run.step + 1 == options.save_at + 2:
        deadline = time.monotonic() + 600
        while not list(ctx.run_dir.glob("checkpoints/step-*")) and time.monotonic() < deadline:
            time.sleep(0.05)  # not beside the save
        found["save_bytes"] = memory.since(before)
        path = options.folder / "torch.pt"
        before, began = memory.begin(), time.perf_counter()
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, path)
        found["torch_stall_s"] = time.perf_counter() - began
        with path.open("rb+") as file:
            os.fsync(file.fileno())
        found["torch_save_s"], found["torch_save_bytes"] = time.perf_counter() - began, memory.since(before)
        before, began = memory.begin(), time.perf_counter()
        loaded = torch.load(path, map_location=ctx.device, weights_only=True)
        torch.cuda.synchronize()
        found["torch_load_s"], found["torch_load_bytes"] = time.perf_counter() - began, memory.since(before)
        del loaded
        torch.cuda.empty_cache()
        path.unlink()
    torch.cuda.synchronize()
    found["host_stall_s"] = dict(boundaries)
    pairs = zip(boundaries, ends, strict=True)
    found["device_stall_s"] = {step: one.elapsed_time(other) / 1e3 for (step, _), (one, other) in pairs}
    found["gpu_bytes"] = torch.cuda.max_memory_allocated()
    part = options.folder / f"attempt-{attempt}.part"
    part.write_text(json.dumps(found))
    part.rename(part.with_suffix(".json"))
    ended = time.perf_counter()
