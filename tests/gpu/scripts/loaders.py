"""Trains with two workers on samples of the host, and evaluates on some that lie on the device: loaders.py STEPS"""

import random
import sys

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import clusterddp


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return {"x": torch.full((4096,), index / 40) + torch.randn(4096), "more": (index % 4, random.random())}


ctx = clusterddp.init()
torch.manual_seed(2)
on_device = TensorDataset(torch.randn(20, 4096, device=ctx.device), torch.arange(20, device=ctx.device) % 4)

# Without workers, batches are pinned in this process, but for tensors that lie on the device.
first = next(ctx.loader(on_device, batch_size=3, shuffle=False).batches(0))
assert torch.equal(first[0], on_device.tensors[0][ctx.rank * 3 : ctx.rank * 3 + 3])
for workers in (0, 1):
    kept = ctx.loader(Noisy(), batch_size=3, to_device=False, num_workers=workers).batches(0)
    batch = next(kept)
    assert batch["x"].device.type == "cpu" and batch["x"].is_pinned() and batch["more"][0].is_pinned(), workers
    kept.close()
plain = next(ctx.loader(Noisy(), batch_size=3, to_device=False, pin_memory=False).batches(0))
assert not plain["x"].is_pinned()

model = ctx.wrap(torch.nn.Sequential(torch.nn.Linear(4096, 4), torch.nn.Dropout(0.1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
run = ctx.run(model=model, optimizer=optimizer, scaler=scaler, loader=ctx.loader(Noisy(), batch_size=3, num_workers=2))
for batch in run.steps(int(sys.argv[1])):
    assert batch["x"].device == batch["more"][1].device == ctx.device
    run.log(seen=batch["x"].double().sum(), drawn=batch["more"][1].sum())
    loss = cross_entropy(model(batch["x"]), batch["more"][0])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    run.log(loss=loss, reduce="mean")
    run.log(half=loss.half(), count=torch.tensor(3, device=ctx.device), on_host=loss.detach().cpu(), true=loss > 0)
    if run.step % 4 == 0:
        right = sum((model.module(x).argmax(1) == y).sum() for x, y in ctx.eval_loader(on_device, batch_size=4))
        run.log(right=ctx.all_reduce_sum(right))
