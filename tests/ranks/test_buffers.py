"""Buffers that a forward changes, such as BatchNorm's statistics: a step that is repeated after a stop counts once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp

SCRIPT = """
import sys, time, torch, clusterddp
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
            ctx.request_stop("in an evaluation before the backward")
        while True:
            ctx.stop_point()
            time.sleep(0.001)
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
    large = "step 3 was stopped after a forward that changed a buffer of over 1 MiB"
    assert resumed["step"] == 3 and resumed["inexact"] == ([large] if size > 1 else [])
    for rank in range(2):
        expected, found = (torch.load(folder / f"final-{rank}.pt") for folder in (whole, stopped))
        different = [name for name, value in expected.items() if not torch.equal(value, found[name])]
        assert different == (["mean"] if size > 1 else [])
