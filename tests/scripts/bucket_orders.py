"""Models whose gradients arrive in another order than their parameters are registered, beside the same in plain DDP.

usage: bucket_orders.py RUN_DIR STEPS [--frozen]; prints each model's buckets after each step, and all final weights.
"""

import hashlib
import json
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import clusterddp

WIDTH, BATCH = 32, 6


def blocks(count):
    return nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count))


class InOrder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = blocks(3), blocks(3), blocks(2)

    def parts(self, step):
        return [*self.first, *self.second, *self.last]

    def forward(self, x, step=0):
        for part in self.parts(step):
            x = part(x.to(next(part.parameters()).dtype))
        return x.float()


class UNetLike(InOrder):
    def parts(self, step):
        return [*self.first, *self.last, *self.second]


class DecoderFirst(InOrder):
    def parts(self, step):
        return [*self.second, *self.last, *self.first]


class Shared(DecoderFirst):
    def __init__(self):
        super().__init__()
        self.first[0][0].weight = self.last[1][0].weight


class Unused(DecoderFirst):
    def parts(self, step):
        return super().parts(step)[step % 2 :]


class Dtypes(DecoderFirst):
    def __init__(self):
        super().__init__()
        self.second.to(torch.bfloat16)
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.complex64))

    def forward(self, x, step=0):
        return super().forward(x * (self.scale * self.scale.conj()).real)


class Sparse(DecoderFirst):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH, sparse=True)

    def forward(self, x, step=0):
        return super().forward(x + self.embedding(torch.arange(BATCH) + step))


SMALL = {"bucket_cap_mb": 0.01}
STATIC = {"static_graph": True}
#: The class, and DDP's options.
MODELS = {
    "in order": (InOrder, {}),
    "UNet-like": (UNetLike, {}),
    "decoder first": (DecoderFirst, {}),
    "shared": (Shared, {}),
    "unused": (Unused, {"find_unused_parameters": True}),
    "dtypes": (Dtypes, {}),
    "sparse": (Sparse, {}),
    "views": (UNetLike, {"gradient_as_bucket_view": True}),
    "late": (DecoderFirst, {}),
    "accumulated": (DecoderFirst, {}),
    "hook": (DecoderFirst, {}),
    "static": (DecoderFirst, STATIC),
}


def buckets(model):
    names = {parameter: name for name, parameter in model.module.named_parameters()}
    return [
        [names[parameter] for parameter in one.parameters()] for one in model.reducer._get_zeros_like_grad_buckets()
    ]


def make(wrap, name):
    torch.manual_seed(5)
    kind, options = MODELS[name]
    net = kind()
    if "--frozen" in sys.argv and name == "decoder first":
        net.first[0].requires_grad_(False)
    model = wrap(net, options)
    if name == "hook":
        model.register_comm_hook(None, count)
    return model


def count(_, bucket):
    """As the default, but counts how often it is called."""
    global calls
    calls += 1
    done = torch.distributed.all_reduce(bucket.buffer().div_(ctx.world_size), async_op=True).get_future()
    return done.then(lambda future: future.value()[0])


def train(model, name, x):
    if name == "late" and run.step < 2:
        return
    if name == "accumulated":
        with model.no_sync():
            model(x * 2).sum().backward()
    model(x, run.step).sum().backward()


ctx = clusterddp.init(seed=3, run_dir=sys.argv[1])
calls = 0
models = {
    name: make(
        lambda net, options: ctx.wrap(
            net, **SMALL, **options, **({"all_used_once": True} if options == STATIC else {})
        ),
        name,
    )
    for name in MODELS
}
plain = {name: make(lambda net, options: DistributedDataParallel(net, **SMALL, **options), name) for name in MODELS}
assert calls == 0, "a hook took part in a throw-away pass"
optimizer = torch.optim.SGD([p for one in models.values() for p in one.parameters()], lr=0.01)
run = ctx.run(models=models, optimizer=optimizer)
for _ in run.steps(int(sys.argv[2])):
    optimizer.zero_grad()
    x = torch.randn(BATCH, WIDTH)
    for name in MODELS:
        train(models[name], name, x)
        train(plain[name], name, x)
    optimizer.step()
    for who, found in (("ours", models), ("plain", plain)):
        ctx.print(json.dumps([run.step, who, {name: buckets(model) for name, model in found.items()}]))
state = {name: value.view(torch.uint8).tolist() for name, value in nn.ModuleList(models.values()).state_dict().items()}
print("weights", hashlib.sha256(json.dumps(state).encode()).hexdigest())
