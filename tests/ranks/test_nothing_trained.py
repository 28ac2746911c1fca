"""A script that trains nothing, or far less than it seems to, does not complete without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterddp.errors import UNCONFIRMED
from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp
from tests.ranks.test_local import submit
from tests.runs_on_disk import outcome_of
from tests.trainings import events_of

SCRIPT = """
import sys
import torch
from torch.utils.data import TensorDataset
import clusterddp

ctx = clusterddp.init()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = ctx.loader(TensorDataset(torch.ones(10, 1)), batch_size=int(sys.argv[2]))
run = ctx.run(model=model, optimizer=optimizer, loader=loader)
if sys.argv[1] == "iterator":
    batches = run.epochs(5)  # not iterated over
for (x,) in run.epochs(5) if sys.argv[1] == "loop" else []:
    model(x).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("how", "confirmed"),
    [
        ("iterator", False),
        pytest.param("no loop", False, marks=pytest.mark.product),
        pytest.param("loop", True, marks=pytest.mark.product),  # as most runs of tests
    ],
)
def test_a_script_that_begins_no_loop_is_not_confirmed(
    run: RunDirectory, tmp_path: Path, how: str, confirmed: bool
) -> None:
    """It called ``ctx.run()``. A loop that is complete already is one that has begun."""
    (script := tmp_path / "script.py").write_text(SCRIPT)
    done = submit(run, str(script), "--device", "cpu", "--", how, "2")
    outcome = outcome_of(run)
    assert outcome is not None and outcome["state"] == "completed"
    assert (outcome.get("confirmed", True), done.returncode) == (confirmed, 0 if confirmed else UNCONFIRMED)
    assert not events_of(run, "short_epochs")


def test_epochs_over_fewer_samples_than_a_global_batch_are_reported(run: RunDirectory, tmp_path: Path) -> None:
    """Five epochs of 10 samples are a single step of 64."""
    (script := tmp_path / "script.py").write_text(SCRIPT)
    done = submit(run, str(script), "--device", "cpu", "--", "loop", "64")
    assert done.returncode == 0
    assert len(events_of(run, "short_epochs")) == 1
    assert len(run.metrics()) == 1


FORGETFUL = """
import sys
import torch
from torch.utils.data import TensorDataset
import clusterddp

how = sys.argv[2]
ctx = clusterddp.init(device="cpu", run_dir=sys.argv[1])
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)


class Own:
    def __init__(self, scheduler):
        self.all = {"main": scheduler}

    def step(self):
        self.all["main"].step()

    def state_dict(self):
        return self.all["main"].state_dict()

    def load_state_dict(self, state):
        self.all["main"].load_state_dict(state)


if how == "sequence":
    parts = [torch.optim.lr_scheduler.StepLR(optimizer, n) for n in (1, 2)]
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])
if how == "nested":  # a composed scheduler inside another one, in an object of the script's own
    parts = [torch.optim.lr_scheduler.StepLR(optimizer, n) for n in (1, 2)]
    inner = torch.optim.lr_scheduler.ChainedScheduler(parts)
    later = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    scheduler = Own(torch.optim.lr_scheduler.SequentialLR(optimizer, [inner, later], milestones=[2]))
given = {} if how == "optimizer" else {"optimizer": optimizer}
given |= {} if how == "scheduler" else {"scheduler": scheduler}
run = ctx.run(model=model, loader=ctx.loader(TensorDataset(torch.ones(10, 1)), batch_size=2), **given)
for (x,) in run.steps(4):
    if how == "inner":
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    model(x).sum().backward()
    optimizer.step()
    scheduler.step()
"""


@pytest.mark.parametrize(
    ("how", "named"),
    [("optimizer", "SGD"), ("scheduler", "StepLR"), ("all", ""), ("inner", ""), ("sequence", ""), ("nested", "")],
)
def test_an_optimizer_or_scheduler_that_ctx_run_did_not_receive_is_named(tmp_path: Path, how: str, named: str) -> None:
    """Not one that is made anew in each step, nor the parts of one that was given."""
    (script := tmp_path / "script.py").write_text(FORGETFUL)
    ddp.run(script, tmp_path / "run", how, ranks=1, folder=tmp_path / "out")
    found = [event["explanation"] for event in events_of(RunDirectory(tmp_path / "run"), "not_given")]
    assert len(found) == bool(named)
    assert all(named in text for text in found)
