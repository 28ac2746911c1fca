"""Weighted and bucketed orders, resumed by real ranks of another number: each step has the same samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import ddp
from tests.preempted import HARNESS

SCRIPT = """
import sys
import torch, clusterddp
from clusterddp import orders

ctx = clusterddp.init()

class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return 43
    def __getitem__(self, index):
        return index, torch.rand(1)

lengths = [7 * index % 31 + 1 for index in range(43)]
order = {"weighted": orders.weighted, "bucketed": orders.bucketed}[sys.argv[1]](lengths)
model = ctx.wrap(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
run = ctx.run(model=model, optimizer=optimizer, loader=ctx.loader(Augmented(), 12 // ctx.world_size, order=order))
for indices, augmented in run.steps(14):
    print("step", run.step, list(zip(indices.tolist(), augmented.flatten().tolist())), flush=True)
    model(augmented).sum().backward()
    optimizer.step()
"""


def of_steps(*started: ddp.Ranks) -> dict[int, list[Any]]:
    """The samples of each global batch, those of rank 0 first."""
    found: dict[int, list[Any]] = {}
    for ranks in started:
        for rank in range(len(ranks.outputs)):
            for line in ranks.output(rank).splitlines():
                if line.startswith("step "):
                    _, step, samples = line.split(" ", 2)
                    found.setdefault(int(step), []).extend(eval(samples))
    return found


@pytest.mark.parametrize("kind", ["weighted", "bucketed"])
def test_an_order_resumed_on_other_ranks_has_the_same_samples_in_each_step(tmp_path: Path, kind: str) -> None:
    """From three ranks to two, within an epoch of 3.6 steps and across the ends of others; augmented equally."""
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(SCRIPT)
    first = ddp.start(HARNESS, tmp_path / "run", "4", script, kind, ranks=3, folder=out).expect(75)
    second = ddp.run(HARNESS, tmp_path / "run", "4", script, kind, ranks=2, folder=out)
    whole = ddp.run(HARNESS, tmp_path / "whole", "", script, kind, ranks=3, folder=out)
    steps = of_steps(whole)
    assert sorted(steps) == list(range(14)) and {len(samples) for samples in steps.values()} == {12}
    assert min(of_steps(second)) == 5
    assert of_steps(first, second) == steps
