"""Buffers that a forward changes, such as BatchNorm's statistics: a step that is repeated after a stop counts once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp

SCRIPT = """
import sys, time, torch, clusterddp
from tests.stops import request_stop
from clusterddp.jobdef.job import Checkpointing
folder, stopped, size = sys.argv[1], sys.argv[2] == "stopped", int(sys.argv[3])

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("assigned", torch.zeros(1))
        self.register_buffer("unused", None)

    def forward(self, x):
        if self.training:
            self.mean += x.mean().detach()
            self.assigned = self.assigned * 0.9 + x.mean().detach()
        return self.out(self.norm(x))

ctx = clusterddp.init(seed=1, device="cpu", run_dir=folder, checkpoint=Checkpointing(every_steps=None, every_s=None))
model = ctx.wrap(Net())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = ctx.loader(torch.utils.data.TensorDataset(torch.arange(160.0).reshape(40, 4) / 40), 2)
run = ctx.run(model=model, optimizer=optimizer, loader=loader)
for (x,) in run.steps(6):
    loss = model(x).square().mean()
    if stopped and ctx.attempt == 0 and run.step == 3:
        if ctx.rank == 1:
            request_stop(ctx)
        while not clusterddp.stop_requested():
            time.sleep(0.001)
        run.stop("in an evaluation before the backward")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.save(model.module.state_dict(), f"{folder}/final-{ctx.rank}.pt")
"""


@pytest.mark.parametrize("size", [1, 300_000])
def test_the_forward_of_a_step_that_is_repeated_after_a_stop_counts_once(tmp_path: Path, size: int) -> None:
    """Large buffers are not copied in each step: the resume then says that it is not exact."""
    script, whole, stopped = tmp_path / "script.py", tmp_path / "whole", tmp_path / "stopped"
    script.write_text(SCRIPT)
    ddp.run(script, whole, "whole", size, ranks=2, folder=tmp_path / "out")
    ddp.start(script, stopped, "stopped", size, ranks=2, folder=tmp_path / "out").expect(75)
    ddp.run(script, stopped, "stopped", size, ranks=2, folder=tmp_path / "out")
    (resumed,) = [event for event in RunDirectory(stopped).events() if event["event"] == "resumed"]
    large = "step 3 was stopped after a forward pass that changed a buffer larger than 1 MiB"
    assert resumed["step"] == 3 and resumed["inexact"] == ([large] if size > 1 else [])
    for rank in range(2):
        expected, found = (torch.load(folder / f"final-{rank}.pt") for folder in (whole, stopped))
        different = [name for name, value in expected.items() if not torch.equal(value, found[name])]
        assert different == (["mean"] if size > 1 else [])


APART = """
import os, sys, time, torch, clusterddp
from tests.stops import request_stop
from clusterddp.jobdef.job import Checkpointing
folder, stopped, how = sys.argv[1], sys.argv[2] == "stopped", sys.argv[3]

ctx = clusterddp.init(seed=1, device="cpu", run_dir=folder, checkpoint=Checkpointing(every_steps=None, every_s=None))
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
net.register_buffer("table", torch.ones(20_000))  # equal on all ranks
model = ctx.wrap(net, **({"broadcast_buffers": False} if how == "never equal" else {}))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
samples = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
run = ctx.run(model=model, optimizer=optimizer, loader=ctx.loader(samples, 4))
seen = {}


def stop(reason):
    if ctx.rank == ctx.world_size - 1:
        request_stop(ctx)
    while not clusterddp.stop_requested():
        time.sleep(0.001)
    run.stop(reason)


for x in run.steps(16):
    if run.every(steps=2):
        net.eval()
        with torch.no_grad():
            seen[run.step] = net(samples).square().mean().item()
            if stopped and ctx.attempt == 1 and run.step == 6:
                stop("in an evaluation")
        net.train()
        value = ctx.all_reduce_mean(seen[run.step], weight=1)
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + value)
    if stopped and ctx.attempt == 0 and run.step == 5:
        if how == "killed":
            run._saver.save_if_due(run.step, run._content, due=True)
            run._saver.finish_newest()
            os._exit(1)
        run.stop("between two steps")
    if how != "accumulating":
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            model(x + ctx.rank)
        continue
    last = run.step % 4 == 3
    model.require_backward_grad_sync = last
    model(x).square().mean().backward()
    if last:
        optimizer.step()
        optimizer.zero_grad()
torch.save({**net.state_dict(), "seen": torch.tensor(list(seen.values())[-5:])}, f"{folder}/final-{ctx.rank}.pt")
"""


def final(folder: Path, rank: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(folder / f"final-{rank}.pt")
    return found


@pytest.mark.parametrize(
    ("how", "ranks"),
    [
        ("accumulating", 3),
        pytest.param("accumulating", 2, marks=pytest.mark.product),
        ("a forward after the optimizer's step", 2),
        pytest.param("never equal", 2, marks=pytest.mark.product),
    ],
)
def test_buffers_that_differ_between_ranks_at_a_stop_are_each_ranks_own_after_it(
    tmp_path: Path, how: str, ranks: int
) -> None:
    """Stopped between two updates, and in an evaluation there: evaluations see the buffers, learning rates follow."""
    script, whole, stopped = tmp_path / "script.py", tmp_path / "whole", tmp_path / "stopped"
    script.write_text(APART)
    ddp.run(script, whole, "whole", how, ranks=ranks, folder=tmp_path / "out")
    for code in (75, 75, 0):
        ddp.start(script, stopped, "stopped", how, ranks=ranks, folder=tmp_path / "out").expect(code)
    resumed = [event for event in RunDirectory(stopped).events() if event["event"] == "resumed"]
    assert [(event["step"], event["inexact"]) for event in resumed] == [(5, []), (6, [])]
    for rank in range(ranks):
        expected, found = final(whole, rank), final(stopped, rank)
        assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []


def test_a_checkpoint_without_the_other_ranks_buffers_is_reported_when_it_is_resumed(tmp_path: Path) -> None:
    """Rank 0 saves alone between two steps, and is killed."""
    script = tmp_path / "script.py"
    script.write_text(APART)
    ddp.start(script, tmp_path / "run", "stopped", "killed", ranks=2, folder=tmp_path / "out").expect(1)
    ddp.start(script, tmp_path / "run", "stopped", "killed", ranks=2, folder=tmp_path / "out").expect(75)
    (resumed,) = [event for event in RunDirectory(tmp_path / "run").events() if event["event"] == "resumed"]
    reason = "model had separate buffers on each rank, but the checkpoint has only rank 0's"
    assert (resumed["step"], resumed["inexact"]) == (5, [reason])
