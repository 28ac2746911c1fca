"""Custom loops whose resume is not the same run: it continues, and is reported as inexact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterddp.history.codec import sentence
from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp
from tests.histories import event_of
from tests.trainings import events_of

SCRIPT = """
import sys
import torch
from torch.utils.data import TensorDataset
import clusterddp

ctx = clusterddp.init(device="cpu", run_dir=sys.argv[2])
model = ctx.wrap(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
loader = ctx.loader(TensorDataset(torch.ones(4, 1)), batch_size=1)
run = ctx.run(model=model, optimizer=optimizer, loader=loader, scheduler=scheduler)


def train(batch, steps_per_update):
    if ctx.attempt == 0 and run.step == STOP:
        run.stop("by the test")
    (x,) = batch
    model(x).square().mean().backward()
    if (run.step + 1) % steps_per_update == 0:
        optimizer.step()
        optimizer.zero_grad()


how = sys.argv[1]
if how == "nested":
    for epoch in range(3):
        for batch in run.epochs(epoch + 1):
            train(batch, 1)
        scheduler.step()
elif how == "phases":
    if run.step < 4:
        for batch in run.steps(4):
            train(batch, 1)
    for batch in run.steps(12):
        train(batch, 1)
else:
    for batch in run.epochs(3):
        train(batch, int(how))
        if run.end_of_epoch:
            scheduler.step()
print("epochs", scheduler.last_epoch, flush=True)
"""


@pytest.mark.parametrize(
    ("how", "stop", "inexact"),
    [
        ("nested", 6, ["the loop to step 4 was already done, and the code after it runs again"]),
        ("nested", 4, []),
        ("phases", 6, []),
        ("2", 5, []),
        ("2", 6, []),
        ("1", 5, []),
    ],
)
def test_a_resume_reports_what_its_loops_repeat_or_skip(tmp_path: Path, how: Any, stop: Any, inexact: Any) -> None:
    """Stopped after ``stop`` steps, in loops of 4 steps per epoch, or with so many steps per update."""
    script, run = tmp_path / "loops.py", tmp_path / "run"
    script.write_text(SCRIPT.replace("STOP", str(stop)))
    ddp.start(script, how, run, ranks=1, folder=tmp_path / "out").expect(75)
    second = ddp.run(script, how, run, ranks=1, folder=tmp_path / "out")
    (resumed,) = events_of(RunDirectory(run), "resumed")
    assert (resumed["step"], resumed["inexact"]) == (stop, inexact)
    if how != "phases" and not inexact:
        assert "epochs 3" in second.output(0)


APART = """
import random, sys
import torch
from torch.utils.data import TensorDataset
import clusterddp


class Own:
    '''State of the script's own.'''
    def __init__(self, **values):
        self.values = values
    def state_dict(self):
        if "rank 0 only" in self.values and ctx.rank:
            raise RuntimeError("this rank has no state")
        return self.values
    def load_state_dict(self, values):
        self.values = values


ctx = clusterddp.init(device="cpu", run_dir=sys.argv[1])
model = torch.nn.Sequential(torch.nn.Linear(1, 200), torch.nn.Linear(200, 200))
if sys.argv[2] == "wrapped":
    model = ctx.wrap(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
own = {
    "env": Own(place=torch.tensor(float(ctx.rank)) if sys.argv[2] == "wrapped" else torch.zeros(())),
    "late": Own(returns=0.0),
    "same": Own(steps=3),
    "secret": Own(**{"rank 0 only": True}),
}
loader = ctx.loader(TensorDataset(torch.rand(8, 1)), batch_size=1)
run = ctx.run(model=model, optimizer=optimizer, loader=loader, script_state={"rank": ctx.rank}, **own)
for (x,) in run.steps(12):
    if ctx.attempt == 0 and run.step == 11:
        run.stop("by the test")
    own["late"].values["returns"] += random.random() if run.step > 4 else 0.0
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ("wrapped", [["env", "script_state"], ["late"]]),
        ("unwrapped", [["model", "optimizer", "script_state"], ["late"]]),
    ],
)
def test_parts_that_differ_between_ranks_are_named_when_detected_and_at_a_resume(
    tmp_path: Path, model: Any, parts: Any
) -> None:
    """An environment, or a model outside DDP, differs after the first step; ``late`` only after some more."""
    script, run = tmp_path / "apart.py", tmp_path / "run"
    script.write_text(APART)
    first = ddp.start(script, run, model, ranks=2, folder=tmp_path / "out").expect(75)
    ddp.run(script, run, model, ranks=2, folder=tmp_path / "out")
    found = events_of(RunDirectory(run), "diverged")
    assert [(event["step"], event["parts"]) for event in found] == list(zip((1, 10), parts, strict=True))
    words = f"the state of {', '.join(parts[0])} differs between ranks, but a checkpoint has only rank 0's"
    assert words in str(sentence(event_of(found[0]))) and words in first.output(0) and words not in first.output(1)
    (resumed,) = events_of(RunDirectory(run), "resumed")
    named = sorted(part for found in parts for part in found)
    assert resumed["inexact"] == [f"{part} differed between ranks, which now all have rank 0's" for part in named]


UNSAVED = """
import sys
import torch
from torch.utils.data import TensorDataset
import clusterddp

ctx = clusterddp.init(device="cpu", run_dir=sys.argv[1])
model, criterion = ctx.wrap(torch.nn.Linear(1, 2)), torch.nn.PReLU()
optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
loader = ctx.loader(TensorDataset(torch.ones(4, 1)), batch_size=1)
run = ctx.run(model=model, optimizer=optimizer, loader=loader)
for (x,) in run.steps(4):
    if ctx.attempt == 0 and run.step == 2:
        run.stop("by the test")
"""


def test_parameters_that_are_trained_but_in_no_part_are_named_at_the_start_and_at_a_resume(tmp_path: Path) -> None:
    """A loss with weights of its own, which only the optimizer was given."""
    script, run = tmp_path / "unsaved.py", tmp_path / "run"
    script.write_text(UNSAVED)
    first = ddp.start(script, run, ranks=1, folder=tmp_path / "out").expect(75)
    words = "ctx.run() received no part with 1 of optimizer's 3 parameters, so checkpoints are incomplete"
    assert words in first.text()
    ddp.run(script, run, ranks=1, folder=tmp_path / "out")
    (resumed,) = events_of(RunDirectory(run), "resumed")
    assert resumed["inexact"] == ["optimizer has parameters that no part saves"]
