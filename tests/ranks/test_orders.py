"""Orders in runs of real ranks that are resumed on another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests import ddp
from tests.preempted import HARNESS

SCRIPT = """
import torch, clusterddp
from clusterddp import orders

ctx = clusterddp.init()

class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return 43
    def __getitem__(self, index):
        return index, torch.rand(1)

weights = [7 * index % 31 + 1 for index in range(43)]
model = ctx.wrap(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
loader = ctx.loader(Augmented(), 12 // ctx.world_size, order=orders.weighted(weights))
run = ctx.run(model=model, optimizer=optimizer, loader=loader)
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


def test_an_order_resumed_on_other_ranks_has_the_same_samples_in_each_step(tmp_path: Path) -> None:
    """From three ranks to two, within an epoch of 3.6 steps and across the ends of others; augmented equally."""
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(SCRIPT)
    first = ddp.start(HARNESS, tmp_path / "run", "4", script, ranks=3, folder=out).expect(75)
    second = ddp.run(HARNESS, tmp_path / "run", "4", script, ranks=2, folder=out)
    whole = ddp.run(HARNESS, tmp_path / "whole", "", script, ranks=3, folder=out)
    steps = of_steps(whole)
    assert sorted(steps) == list(range(14)) and {len(samples) for samples in steps.values()} == {12}
    assert min(of_steps(second)) == 5
    assert of_steps(first, second) == steps
