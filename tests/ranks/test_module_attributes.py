"""What no state_dict has of a module: a resume restores what the script has changed in its loop, or names it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp
from tests.trainings import events_of

SCRIPT = """
import copy
import sys
import torch
from torch.utils.data import TensorDataset
import clusterddp
from tests.stops import request_stop

run_dir, stop, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
CHANGED = 3  # the step in which the script changes the model, once
ctx = clusterddp.init(device="cpu", seed=5, run_dir=run_dir)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.drop = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3)
        self.head = torch.nn.Linear(8, 1)
        self.scale, self.calls, self.cached, self.cache, self.mean = 1.0, 0, False, None, 0.0
        self.loaded = False

    def load_state_dict(self, *values, **options):
        self.loaded = True
        return super().load_state_dict(*values, **options)

    def forward(self, x):
        self.calls += 1
        if not self.cached:
            self.cached, self.cache, self.made_late = True, torch.ones(8), 3
        y = self.head(self.drop(self.norm(self.body(x)))) * self.scale
        self.mean = float(y.detach().mean())
        return y


net = Net()
if how == "frozen before ctx.wrap":
    net.body.requires_grad_(False)
model = ctx.wrap(net, find_unused_parameters=True)
net.body.requires_grad_(how not in ("once", "phases", "frozen from now on", "frozen before ctx.wrap"))
if how == "frozen from now on" and ctx.attempt:
    net.head.requires_grad_(False)
optimizer = torch.optim.SGD([*net.body.parameters(), *net.norm.parameters()], lr=0.02)
optimizer.add_param_group({"params": list(net.head.parameters())})
loader = ctx.loader(TensorDataset(torch.arange(512.0).reshape(64, 8) / 512), batch_size=4)
average = copy.deepcopy(net)
run = ctx.run(model=model, average=average, optimizer=optimizer, loader=loader)
if how == "what a resume does not repeat":
    net.body.requires_grad_(False)


def change():
    if how in ("once", "what a resume does not repeat", "frozen before ctx.wrap", "frozen from now on"):
        net.body.requires_grad_(True)
    if how == "once":
        net.norm.eval()
        net.drop.p = 0.8
    elif how == "what a resume does not repeat":
        net.scale = 3.0
        net.head.register_forward_hook(lambda module, inputs, output: output * 2)
    elif how == "group":
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})


def train(x, step):
    if ctx.attempt == 0 and step == stop - 1 and how not in ("stopped in an evaluation", "evaluated outside the loop"):
        request_stop(ctx)
    if step == CHANGED:
        change()
        average.eval()
        average(x)  # only in evaluations
    if how in ("left in eval mode", "stopped in an evaluation"):
        model.train()
        if run.every(steps=2):
            model.eval()
            if ctx.attempt == 0 and step == stop:
                run.stop("by the test")
            model(x)
            model.train()
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if how == "left in eval mode":
        model.eval()


if how == "phases" and run.step < CHANGED:
    for (x,) in run.steps(CHANGED):
        train(x, run.step)
if how == "phases":
    net.body.requires_grad_(True)


def evaluate():
    was = model.training
    model.eval()
    if ctx.attempt == 0 and run.step == stop:
        request_stop(ctx)
    for (x,) in ctx.eval_loader(TensorDataset(torch.ones(8, 8)), batch_size=1):
        model(x)
    model.train(was)


if how == "evaluated outside the loop":
    evaluate()
    while run.step < 6:
        for (x,) in run.steps(10):
            train(x, run.step)
            if run.step % 3 == 2:
                break
        evaluate()
for (x,) in run.steps(10):
    train(x, run.step)
print("head trains:", net.head.weight.requires_grad, flush=True)
if ctx.is_main:
    torch.save(net.state_dict(), f"{run_dir}/final.pt")
"""


def resumed(folder: Path, how: str, stop: int, ranks: int = 1) -> tuple[RunDirectory, str]:
    """A run that is stopped once, and what its last attempt has printed."""
    (script := folder / "changing.py").write_text(SCRIPT)
    ddp.start(script, folder / "run", stop, how, ranks=ranks, folder=folder / "out").expect(75)
    last = ddp.run(script, folder / "run", stop, how, ranks=ranks, folder=folder / "out")
    return RunDirectory(folder / "run"), last.output(0)


def is_exact(folder: Path, how: str, run: RunDirectory) -> bool:
    """Whether the run has the weights of one that is not stopped."""
    ddp.run(folder / "changing.py", folder / "whole", -1, how, ranks=1, folder=folder / "out")
    one, other = (torch.load(path / "final.pt", weights_only=True) for path in (folder / "whole", run.path))
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("how", "stop"),
    [
        *(("once", 6), ("phases", 3), ("phases", 6), ("left in eval mode", 6), ("stopped in an evaluation", 6)),
        *(("evaluated outside the loop", 0), ("evaluated outside the loop", 3)),
    ],
)
def test_a_change_that_the_script_has_made_once_in_its_loop_survives_a_resume(
    tmp_path: Path, how: str, stop: int
) -> None:
    """Counters, caches, what a model makes late, and what loading it sets, are no reason to report it as inexact."""
    run, _ = resumed(tmp_path, how, stop)
    assert is_exact(tmp_path, how, run)
    assert not events_of(run, "not_restored")
    assert [event["inexact"] for event in events_of(run, "resumed")] == [[]]


def test_a_change_that_a_resume_does_not_repeat_is_named(tmp_path: Path) -> None:
    """What the script sets itself after ``ctx.run()`` takes precedence, and its own attributes are not touched."""
    how = "what a resume does not repeat"
    run, _ = resumed(tmp_path, how, 6)
    assert not is_exact(tmp_path, how, run)
    (event,) = events_of(run, "not_restored")
    assert [text.partition(" was ")[0] for text in event["inexact"]] == [
        *("model.body.bias.requires_grad", "model.body.weight.requires_grad", "model.head hooks", "model.scale")
    ]


def test_what_a_script_gives_ctx_run_in_another_state_than_before_stays_as_it_is(tmp_path: Path) -> None:
    """The user has frozen a further layer, from now on."""
    run, printed = resumed(tmp_path, "frozen from now on", 6)
    assert "head trains: False" in printed
    assert not events_of(run, "not_restored")


def test_parameters_that_are_unfrozen_but_not_averaged_by_ddp_are_reported(tmp_path: Path) -> None:
    """They were frozen when the model was wrapped, so the ranks train them apart, with a resume and without."""
    run, _ = resumed(tmp_path, "frozen before ctx.wrap", 6, ranks=2)
    assert events_of(run, "diverged")[0]["parts"] == ["model"]
    (event,) = events_of(run, "resumed")
    assert len(event["inexact"]) == 1


def test_a_group_of_parameters_that_is_added_after_ctx_run_is_reported_when_it_is_added(tmp_path: Path) -> None:
    """The checkpoints from then on cannot be resumed by the same script."""
    (script := tmp_path / "changing.py").write_text(SCRIPT)
    ddp.start(script, tmp_path / "run", 6, "group", ranks=1, folder=tmp_path / "out").expect(75)
    assert [event["step"] for event in events_of(RunDirectory(tmp_path / "run"), "group_added")] == [3]
