"""What a script gives to ``ctx.run()`` and ``run.log()``, and what it is told when that cannot be kept."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from clusterddp.training import metrics
from clusterddp.training.state import pack, unpack
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


@pytest.mark.parametrize("value", [np.ones(3), torch.ones(0), object(), {"loss": torch.ones(1)}, {1, 2}])
def test_a_value_that_the_history_has_no_form_for_is_refused_where_it_is_logged(value):
    with pytest.raises(TypeError, match=r"run.log\(loss=...\): expected a number"):
        metrics.check("loss", value)


@pytest.mark.parametrize("value", [1, 0.5, float("nan"), "text", None, np.float32(0.5), np.ones(1), torch.ones(1, 1)])
def test_a_number_in_any_form_is_logged(value):
    metrics.check("loss", value)


def test_a_state_may_hold_numpys_scalars_as_metrics_often_are():
    """Those that compute as Python's numbers become such; narrower floats round otherwise, and stay what they are."""
    scalars = [np.float64(0.1), np.int64(3), np.bool_(True), np.float32(0.1), np.float16("nan")]
    plain, tensors = pack({"scalars": scalars})
    restored = unpack(json.loads(json.dumps(plain)), tensors)["scalars"]
    assert [type(value) for value in restored] == [float, int, bool, np.float32, np.float16]
    assert restored[:4] == scalars[:4] and np.isnan(restored[4])
