"""One step's gradients under DDP with the batch cut by run.micro(), for comparison with the joined batch's.

usage: micro.py OUT GLOBAL_BATCH BATCH_SIZE [OPTIONS]; rank 0 writes OUT: the gradients after two steps' loops.
"""

import argparse

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import TensorDataset

import clusterddp

parser = argparse.ArgumentParser()
parser.add_argument("out")
parser.add_argument("global_batch", type=int)
parser.add_argument("batch_size", type=int)
parser.add_argument("--ddp", default="", help="an option of DDP to switch on")
parser.add_argument("--body", default="", help="what the loop's body does wrong")
parser.add_argument("--count", action="store_true", help="print how many buckets are reduced over the ranks")
parser.add_argument("--whole", action="store_true", help="without run.micro()")
args = parser.parse_args()


class Net(nn.Module):
    """The second branch has a part in the loss only where a piece has a negative sample."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 300), nn.Linear(8, 300), nn.Linear(300, 3)

    def forward(self, x):
        h = self.first(x).tanh()
        if args.ddp != "find_unused_parameters" or (x[:, 0] < 0).any():
            h = h + self.second(x).tanh() * (x[:, :1] < 0)
        return self.last(h)


torch.manual_seed(1)
data = TensorDataset(torch.randn(96, 8), torch.randint(3, (96,)))
ctx = clusterddp.init(seed=3)
options = {args.ddp: True} if args.ddp else {}
model = ctx.wrap(Net(), bucket_cap_mb=0.005, **options)
buckets = 0


def reduce(_, bucket):
    global buckets
    buckets += 1
    return allreduce_hook(None, bucket)


if args.count:
    model.register_comm_hook(None, reduce)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = ctx.loader(data, args.global_batch // ctx.world_size)
loader.batch_size = args.batch_size
run = ctx.run(model=model, optimizer=optimizer, loader=loader)
for batch in run.steps(2):
    if args.body != "zero_grad":
        optimizer.zero_grad()
    for x, y in [batch] if args.whole else run.micro(batch):
        assert len(x) <= args.batch_size or args.whole
        if args.body == "zero_grad":
            optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        if args.body != "no backward":
            loss.backward()
        if args.body == "step":
            optimizer.step()
        if args.body == "break":
            break
    if run.step == 0:
        optimizer.step()
print(f"{buckets} buckets reduced")
if ctx.is_main:
    torch.save({name: parameter.grad for name, parameter in model.module.named_parameters()}, args.out)
