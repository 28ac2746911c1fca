"""A script that trains nothing, or far less than it seems to, does not complete without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterddp.errors import UNCONFIRMED
from clusterddp.rundir.run_directory import RunDirectory
from tests.ranks.test_local import submit
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


@pytest.mark.parametrize(("how", "confirmed"), [("no loop", False), ("iterator", False), ("loop", True)])
def test_a_script_that_begins_no_loop_is_not_confirmed(
    run: RunDirectory, tmp_path: Path, how: str, confirmed: bool
) -> None:
    """It called ``ctx.run()``. A loop that is complete already is one that has begun."""
    (script := tmp_path / "script.py").write_text(SCRIPT)
    done = submit(run, str(script), "--device", "cpu", "--", how, "2")
    outcome = run.outcome()
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
