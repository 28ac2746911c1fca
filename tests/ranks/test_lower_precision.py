"""Parameters in bfloat16, and an optimizer with a state in float32: the resume is exact, or reported as inexact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp
from tests.trainings import events_of

SCRIPT = """
import sys
import torch
from torch.utils.data import TensorDataset
import clusterddp

run_dir, stop, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]


class Momentum(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state.update(moment=torch.zeros_like(parameter, dtype=torch.float32), master=parameter.float())
            state["moment"].lerp_(parameter.grad.to(state["moment"].dtype), 0.1)
            parameter.copy_(state["master"].sub_(state["moment"], alpha=0.01))


class Hidden:
    __slots__ = ("load_state_dict", "param_groups", "state_dict", "step", "zero_grad")

    def __init__(self, optimizer):
        for name in self.__slots__:
            setattr(self, name, getattr(optimizer, name))


ctx = clusterddp.init(device="cpu", seed=1, run_dir=run_dir)
dtype = torch.float16 if how == "changed" and ctx.attempt else torch.bfloat16
model = ctx.wrap(torch.nn.Linear(16, 16).to(dtype))
optimizer = Momentum(model.parameters(), {})
if how == "hidden":
    optimizer = Hidden(optimizer)
loader = ctx.loader(TensorDataset(torch.randn(64, 16)), batch_size=2)
run = ctx.run(optimizer=optimizer, model=model, loader=loader)
for (x,) in run.steps(20):
    if ctx.attempt == 0 and run.step == stop:
        run.stop("by the test")
    optimizer.zero_grad()
    model(x.to(dtype)).float().square().mean().backward()
    optimizer.step()
if ctx.is_main:
    torch.save(model.module.state_dict(), f"{run_dir}/final.pt")
"""
OF_OPTIMIZER = "4 tensors of optimizer changed dtype, such as state.0.moment"
OF_MODEL = "2 tensors of model changed dtype, such as weight"


@pytest.mark.parametrize(
    ("how", "inexact"), [("plain", []), ("hidden", [OF_OPTIMIZER]), ("changed", [OF_MODEL, OF_OPTIMIZER])]
)
def test_a_resume_keeps_the_precision_of_the_optimizer_or_is_reported_as_inexact(
    tmp_path: Path, how: str, inexact: list[str]
) -> None:
    """``hidden``: in an object that does not show it. ``changed``: the script now has parameters in float16."""
    script, whole, run = tmp_path / "precision.py", tmp_path / "whole", tmp_path / "run"
    script.write_text(SCRIPT)
    ddp.start(script, run, 9, how, ranks=2, folder=tmp_path / "out").expect(75)
    ddp.run(script, run, 9, how, ranks=2, folder=tmp_path / "out")
    (resumed,) = events_of(RunDirectory(run), "resumed")
    assert (resumed["step"], resumed["inexact"]) == (9, inexact)
    if not inexact:
        ddp.run(script, whole, -1, how, ranks=2, folder=tmp_path / "out")
        one, other = (torch.load(path / "final.pt", weights_only=True) for path in (whole, run))
        assert all(torch.equal(one[name], other[name]) for name in one)
