"""What a script gives to ``ctx.run()`` and ``run.log()``, and what it is told when that cannot be kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from clusterddp.training import metrics
from tests import ddp

SCRIPT = """
import sys
import torch
from torch.utils.data import TensorDataset
import clusterddp

ctx = clusterddp.init(device="cpu")
model = ctx.wrap(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = ctx.loader(TensorDataset(torch.ones(8, 1)), batch_size=1)
run = ctx.run(model=model, optimizer=optimizer, loader=loader, ema=None, best=eval(sys.argv[1]))
for _ in run.steps(1):
    run.log(confusion=torch.ones(2, 2))
"""


@pytest.mark.parametrize(
    ("best", "words"),
    [
        ("1.5", "run(best=...) was given a float: expected something with state_dict() and load_state_dict()"),
        ("None", "run.log(confusion=...): expected a number or a tensor of one element, got a Tensor of 4 elements"),
    ],
)
def test_a_part_or_a_value_that_cannot_be_kept_is_refused_by_its_name(tmp_path, best, words):
    script = tmp_path / "gives.py"
    script.write_text(SCRIPT)
    ranks = ddp.start(script, best, ranks=1, folder=tmp_path / "out").expect(1)
    assert words in ranks.output(0)


CHANGING = """
import sys
import torch
from torch.utils.data import TensorDataset
import clusterddp

ctx = clusterddp.init(device="cpu", run_dir=sys.argv[2])
model = ctx.wrap(torch.nn.Linear(2, 3 if sys.argv[1] == "wide" else 1))
groups = [{"params": [parameter]} for parameter in model.parameters()]
optimizer = torch.optim.SGD(groups if sys.argv[1] == "groups" else model.parameters(), lr=0.1)
others = {"ema": model} if sys.argv[1] == "ema" else {}
loader = ctx.loader(TensorDataset(torch.ones(8, 2)), batch_size=1)
run = ctx.run(model=model, optimizer=optimizer, loader=loader, **others)
for _ in run.steps(1):
    pass
"""


def test_a_checkpoint_that_does_not_fit_is_an_error_that_names_the_part_and_the_remedy(tmp_path):
    script, run = tmp_path / "changing.py", tmp_path / "run"
    script.write_text(CHANGING)
    ddp.run(script, "as it was", run, ranks=1, folder=tmp_path / "out")
    for change, words in {
        "wide": "model does not take the checkpoint's state: Error(s) in loading state_dict",
        "groups": "optimizer does not take the checkpoint's state: loaded state dict has a different number",
        "ema": "the checkpoint has no ema; it has model, optimizer",
    }.items():
        said = ddp.start(script, change, run, ranks=1, folder=tmp_path / "out").expect(1).output(0)
        assert f"CheckpointError: {words}" in said
        assert "Give run() what the run began with, or begin a new run" in said


@pytest.mark.parametrize("value", [np.ones(3), torch.ones(0), object(), {"loss": torch.ones(1)}, {1, 2}])
def test_a_value_that_the_history_has_no_form_for_is_refused_where_it_is_logged(value):
    with pytest.raises(TypeError, match=r"run.log\(loss=...\): expected a number"):
        metrics.check("loss", value)


@pytest.mark.parametrize("value", [1, 0.5, float("nan"), "text", None, np.float32(0.5), np.ones(1), torch.ones(1, 1)])
def test_a_number_in_any_form_is_logged(value):
    metrics.check("loss", value)
