"""Trains a model of each kind that ctx.wrap() takes, side by side in one run: variants.py STEPS

Buckets of 10 kB: each model has several, and three ranks sum their gradients in the order of the buckets.
"""

import contextlib
import sys

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.functional import cross_entropy

import clusterddp

STEPS = int(sys.argv[1])


class Net(nn.Module):
    """``branch`` is used in some steps, and not by all ranks, if ``sometimes``."""

    def __init__(self, *, norm=None, sometimes=False, halves=False):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(12, 64), *([norm] if norm else []), nn.ReLU(), nn.Dropout(0.2))
        self.branch = nn.Linear(64, 64)
        self.last = nn.Linear(64, 4)
        self.sometimes, self.halves = sometimes, halves

    def forward(self, x, step):
        x = self.first(x)
        x = x.to(self.branch.weight)  # of another precision, or on another device
        if not self.sometimes or (step + ctx.rank) % 3:
            x = x + self.branch(x).relu()
        return self.last(x.to(self.last.weight))


def halved(net, device):
    net.first.to(ctx.device)
    net.branch.to(device), net.last.to(device)
    return net


ctx = clusterddp.init()
torch.manual_seed(1)
others = torch.device("cuda", ctx.rank + ctx.world_size)
frozen, mixed = Net(), Net()
frozen.first.requires_grad_(False)
mixed.branch.to(torch.bfloat16)
buckets = {"bucket_cap_mb": 0.01}
models = {
    "plain": ctx.wrap(Net(), **buckets),
    "unused": ctx.wrap(Net(sometimes=True), find_unused_parameters=True, **buckets),
    "static": ctx.wrap(Net(), static_graph=True, all_used_once=True, **buckets),
    "unsettled": ctx.wrap(Net(), static_graph=True),
    "views": ctx.wrap(Net(), gradient_as_bucket_view=True, **buckets),
    "buffers": ctx.wrap(Net(norm=nn.BatchNorm1d(64)), **buckets),
    "accumulated": ctx.wrap(Net(), **buckets),
    "scaled": ctx.wrap(Net(norm=nn.BatchNorm1d(64)), **buckets),
    "frozen": ctx.wrap(frozen, **buckets),
    "compressed": ctx.wrap(Net(), **buckets),
    "mixed": ctx.wrap(mixed, **buckets),
}
assert all(model.device_ids == [ctx.device.index] for model in models.values())
ctx.devices = (ctx.device, others)  # as with gpus_per_rank=2
models["two_devices"] = ctx.wrap(halved(Net(), others), **buckets)
models["compressed"].register_comm_hook(None, default_hooks.fp16_compress_hook)
optimizers = {
    name: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for name, model in models.items()
}
scaler = torch.amp.GradScaler("cuda", init_scale=2.0**14, growth_interval=2)
samples = torch.utils.data.TensorDataset(torch.randn(90, 12), torch.arange(90) % 4)
loader = ctx.loader(samples, batch_size=4)
run = ctx.run(models=models, optimizers=optimizers, scaler=scaler, loader=loader)
for x, y in run.steps(STEPS):
    assert x.device == y.device == ctx.device
    for name, model in models.items():
        optimizer = optimizers[name]
        optimizer.zero_grad()
        for count, (inputs, labels) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
            waits = model.no_sync() if name == "accumulated" and count == 0 else contextlib.nullcontext()
            with waits, torch.autocast("cuda", torch.float16, enabled=name == "scaled"):
                found = model(inputs, run.step)
                loss = cross_entropy(found.float(), labels.to(found.device))
            (scaler.scale(loss) if name == "scaled" else loss).backward()
        if name == "scaled":
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        run.log(**{name: loss})
    run.log(scale=scaler.get_scale())
