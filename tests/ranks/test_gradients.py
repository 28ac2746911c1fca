"""Gradients that are accumulated over several steps of the loop: a stop between two updates keeps them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp
from tests.trainings import events_of

SCRIPT = """
import contextlib
import json
import sys
import torch
from torch.utils.data import TensorDataset
import clusterddp
from clusterddp.jobdef.job import Checkpointing

run_dir, stop, how, options = sys.argv[1], int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
EVERY = 3
ctx = clusterddp.init(device="cpu", seed=5, run_dir=run_dir, checkpoint=Checkpointing(every_steps=4))
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1))
if how == "unused":
    net.head = torch.nn.Linear(16, 1)
    net.forward = lambda x: net[3](net[2](net[1](net[0](x))))
if how == "no_sync branches":
    net.heads = torch.nn.ModuleList(torch.nn.Linear(16, 1) for _ in range(3))
    body, head = net.forward, lambda: net.heads[(run.step % EVERY == 1) * (1 + ctx.rank)]
    net.forward = lambda x: head()(net[2](net[1](net[0](x))))
model = ctx.wrap(net, **options)
if how == "compiled":
    model = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
loader = ctx.loader(TensorDataset(torch.arange(512.0).reshape(64, 8) / 512), batch_size=2)
critic = ctx.wrap(torch.nn.Linear(8, 1))
whole = torch.nn.ModuleDict({"net": model, "critic": critic}) if how == "module dict" else model
often = torch.optim.SGD(critic.parameters(), lr=0.1)
others = {"critic": critic, "often": often} if how == "two optimizers" else {}
run = ctx.run(model=whole, optimizer=optimizer, loader=loader, **others)
for (x,) in run.steps(12):
    stops = ctx.attempt == 0 and run.step == stop
    if stops and how != "evaluation":
        run.stop("by the test")
    last = run.step % EVERY == EVERY - 1
    model.require_backward_grad_sync = how != "no_sync flag" or last
    with model.no_sync() if how.startswith("no_sync") and "flag" not in how and not last else contextlib.nullcontext():
        (model(x).square().mean() / EVERY).backward()
    if stops:
        run.stop("in an evaluation")
    if others:
        often.zero_grad()
        critic(x).square().mean().backward()
        often.step()
    if how == "evaluation before":
        with torch.no_grad():
            for (y,) in ctx.eval_loader(TensorDataset(torch.ones(4, 8)), batch_size=1):
                model(y)
    if last:
        optimizer.step()
        optimizer.zero_grad()
if ctx.is_main:
    torch.save(net.state_dict(), f"{run_dir}/final.pt")
"""
LOST = ["the checkpoint was taken between a backward pass and the optimizer's step, without the gradients"]


def weights(run: Path) -> dict[str, torch.Tensor]:
    final: dict[str, torch.Tensor] = torch.load(run / "final.pt", weights_only=True)
    return final


@pytest.mark.parametrize(
    ("how", "stop", "options", "inexact"),
    [
        pytest.param("each step", 7, "{}", [], marks=pytest.mark.product),  # one backward waits
        ("each step", 8, '{"gradient_as_bucket_view": true}', []),  # two do
        ("two optimizers", 7, "{}", []),  # the other one steps in each step
        pytest.param(  # the model's last parameter gets no gradient
            "unused", 7, '{"find_unused_parameters": true}', [], marks=pytest.mark.product
        ),
        ("module dict", 7, "{}", []),  # what the run is given is not itself in DDP
        pytest.param("compiled", 7, "{}", [], marks=pytest.mark.product),  # test_compiled_shapes.py has compiled models
        pytest.param(  # after the backward, without gradients
            "evaluation before", 7, "{}", [], marks=pytest.mark.product
        ),
        pytest.param("no_sync flag", 7, "{}", [], marks=pytest.mark.product),
        ("no_sync", 7, "{}", []),  # each rank has its own
        ("no_sync branches", 8, '{"find_unused_parameters": true}', []),  # used in no_sync only, on rank 1 only
        pytest.param(  # as the one above, and "each step" with it
            "no_sync branches",
            8,
            '{"find_unused_parameters": true, "gradient_as_bucket_view": true}',
            [],
            marks=pytest.mark.product,
        ),
        pytest.param("no_sync", 6, "{}", [], marks=pytest.mark.product),
        ("evaluation", 6, "{}", []),  # the backward of the step that is done again is not one that waits
        ("evaluation", 7, "{}", LOST),
    ],
)
def test_a_run_stopped_between_two_updates_is_the_same_run_or_reported_as_inexact(
    tmp_path: Path, how: str, stop: int, options: str, inexact: list[str]
) -> None:
    """An update every three steps, on two ranks. Gradients that each rank has for itself are brought together."""
    script, whole, run = tmp_path / "accumulating.py", tmp_path / "whole", tmp_path / "run"
    script.write_text(SCRIPT)
    ddp.run(script, whole, -1, how, options, ranks=2, folder=tmp_path / "out")
    ddp.start(script, run, stop, how, options, ranks=2, folder=tmp_path / "out").expect(75)
    ddp.run(script, run, stop, how, options, ranks=2, folder=tmp_path / "out")
    (resumed,) = events_of(RunDirectory(run), "resumed")
    assert (resumed["step"], resumed["inexact"]) == (stop, inexact)
    one, other = weights(whole), weights(run)
    assert all(torch.equal(one[name], other[name]) for name in one) == (not inexact)


def test_a_checkpoint_that_is_taken_between_two_updates_holds_the_gradients(tmp_path: Path) -> None:
    """Of the run's last attempt but one, killed: nothing was agreed on."""
    script, whole, run = tmp_path / "accumulating.py", tmp_path / "whole", tmp_path / "run"
    script.write_text(SCRIPT)
    ddp.run(script, whole, -1, "each step", "{}", ranks=2, folder=tmp_path / "out")
    script.write_text(SCRIPT.replace('run.stop("by the test")', "run._saver.finish_newest(); import os; os._exit(1)"))
    ddp.start(script, run, 6, "each step", "{}", ranks=2, folder=tmp_path / "out").expect(1)
    ddp.run(script, run, 6, "each step", "{}", ranks=2, folder=tmp_path / "out")
    (resumed,) = events_of(RunDirectory(run), "resumed")
    assert (resumed["step"], resumed["inexact"]) == (4, [])
    one, other = weights(whole), weights(run)
    assert all(torch.equal(one[name], other[name]) for name in one)


UNUSED = """
import sys
import torch
from torch.utils.data import TensorDataset
import clusterddp

run_dir, stop, to_none, place = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "none", sys.argv[4]
ctx = clusterddp.init(device="cpu", seed=1, run_dir=run_dir)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x, head):
        return self.head(self.body(x)) if head else self.body(x)


model = ctx.wrap(Net(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
run = ctx.run(model=model, optimizer=optimizer, loader=ctx.loader(TensorDataset(torch.randn(64, 4)), batch_size=2))
for (x,) in run.steps(10):
    if ctx.attempt == 0 and run.step == stop:
        run.stop("by the test")
    if place == "before":
        optimizer.zero_grad(set_to_none=to_none)
    model(x, run.step % 3 == 0).square().mean().backward()
    optimizer.step()
    if place == "after":
        optimizer.zero_grad(set_to_none=to_none)
if ctx.is_main:
    torch.save(model.module.state_dict(), f"{run_dir}/final.pt")
"""


@pytest.mark.parametrize("place", [pytest.param("before", marks=pytest.mark.product), "after"])
@pytest.mark.parametrize("zeroed_to", ["zeros", pytest.param("none", marks=pytest.mark.product)])
def test_parameters_that_a_step_leaves_unused_are_updated_as_without_a_stop(
    tmp_path: Path, zeroed_to: str, place: str
) -> None:
    """With ``set_to_none=False``, momentum moves them on in the steps that do not use them."""
    script, whole, run = tmp_path / "unused.py", tmp_path / "whole", tmp_path / "run"
    script.write_text(UNUSED)
    ddp.run(script, whole, -1, zeroed_to, place, ranks=2, folder=tmp_path / "out")
    ddp.start(script, run, 4, zeroed_to, place, ranks=2, folder=tmp_path / "out").expect(75)
    ddp.run(script, run, 4, zeroed_to, place, ranks=2, folder=tmp_path / "out")
    (resumed,) = events_of(RunDirectory(run), "resumed")
    assert (resumed["step"], resumed["inexact"]) == (4, [])
    one, other = weights(whole), weights(run)
    assert all(torch.equal(one[name], other[name]) for name in one)
