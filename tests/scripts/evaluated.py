"""A training that evaluates twice after each epoch, and is told to stop at chosen points.

usage: evaluated.py RUN_DIR [POINT...]: attempt n stops at the n-th point, which is NAME@STEP; each rank writes
RUN_DIR/final-RANK.pt at the end.
"""

import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import clusterddp
from clusterddp.jobdef.job import Checkpointing, Keep
from tests.stops import await_stop

folder, points = Path(sys.argv[1]), sys.argv[2:]


def point(name):
    """A real TERM to rank 0 here, if this attempt is to stop here; no rank continues before it is heard."""
    if ctx.attempt >= len(points) or points[ctx.attempt] != f"{name}@{run.step}":
        return
    if ctx.rank == 0:
        signal.raise_signal(signal.SIGTERM)
    await_stop(ctx)


@torch.no_grad()
def evaluate(name):
    model.eval()
    total = count = 0.0
    for number, (inputs, targets) in enumerate(ctx.eval_loader(held_out, batch_size=4)):
        total += float((model(inputs) - targets).square().sum())
        count += len(inputs)
        if number == 0:
            point(f"in {name}")
    model.train()
    return ctx.all_reduce_mean(total / count, weight=count)


torch.manual_seed(1)
inputs = torch.randn(52, 3)
data, held_out = (TensorDataset(part, part.sum(1, keepdim=True)) for part in (inputs[:20], inputs[20:]))
ctx = clusterddp.init(seed=3, run_dir=folder, checkpoint=Checkpointing(every_s=None, keep=Keep(1)))
model = ctx.wrap(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
progress = {"best": float("inf"), "patience": 0, "history": []}
loader = ctx.loader(data, batch_size=4 // ctx.world_size)
run = ctx.run(
    model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, script_state=progress, best="-held_out_loss"
)
for inputs, targets in run.epochs(12):
    if run.every(epochs=1):
        point("before")
        loss = evaluate("first")
        scheduler.step(loss)
        progress["patience"] = 0 if loss < progress["best"] else progress["patience"] + 1
        progress["best"] = min(loss, progress["best"])
        progress["history"].append(loss)
        run.log(held_out_loss=loss, lr=optimizer.param_groups[0]["lr"])
        if progress["patience"] >= 3:
            run.finish()
        point("between")
        run.log(again=evaluate("second"))
        point("after")
    loss = (model(inputs) - targets).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    run.log(loss=loss)
    point("trained")
run.log(held_out_loss=evaluate("last"))  # of the last checkpoint
print(f"ended after {run.step} steps", flush=True)
state = {name: part.state_dict() for name, part in (("model", model), ("optimizer", optimizer), ("sched", scheduler))}
torch.save({**state, "progress": progress}, folder / f"final-{ctx.rank}.pt")
