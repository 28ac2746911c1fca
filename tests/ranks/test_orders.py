"""Orders in runs of real ranks that are resumed: on another number of ranks, and with other weights to come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterddp.events import sentence
from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp
from tests.preempted import HARNESS
from tests.trainings import events_of

SCRIPT = """
import json, sys
import torch, clusterddp
from clusterddp import orders

ctx = clusterddp.init()

class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return 43
    def __getitem__(self, index):
        return index, torch.rand(1)

lengths = [7 * index % 31 + 1 for index in range(43)]
order = {"weighted": orders.weighted, "bucketed": orders.bucketed}.get(sys.argv[1], lambda _: None)(lengths)
data = Augmented()
if sys.argv[1] == "mixture":
    changes = {int(step): weights for step, weights in json.loads(sys.argv[2]).items()}
    data, order = {"odd": data, "even": Augmented()}, orders.mixture({"odd": 3, "even": 1}, changes=changes)
model = ctx.wrap(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
run = ctx.run(model=model, optimizer=optimizer, loader=ctx.loader(data, 12 // ctx.world_size, order=order))
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


def test_other_weights_in_steps_to_come_are_recorded_and_those_of_the_past_refused(tmp_path: Path) -> None:
    """Up to the change, the samples stay those of the run without it."""
    script, out, run = tmp_path / "script.py", tmp_path / "out", tmp_path / "run"
    script.write_text(SCRIPT)
    words = [script, "mixture"]
    old, new, past = ('{"9": {"odd": 1, "even": 3}}', '{"7": {"odd": 0, "even": 1}}', '{"3": {"odd": 1, "even": 3}}')
    ddp.start(HARNESS, run, "4", *words, old, ranks=2, folder=out).expect(75)
    refused = ddp.start(HARNESS, run, "4", *words, past, ranks=2, folder=out).expect(1)
    assert "Weights may change only from step 5 on, where the run resumes, but the weights of step 3" in refused.output(
        0
    )
    second = ddp.start(HARNESS, run, "4,4,9", *words, new, ranks=2, folder=out).expect(75)
    third = ddp.run(HARNESS, run, "4", *words, new, ranks=2, folder=out)
    whole = of_steps(ddp.run(HARNESS, tmp_path / "whole", "", *words, old, ranks=2, folder=out))
    steps = of_steps(second, third)
    assert sorted(steps) == list(range(5, 14))
    assert [steps[step] for step in (5, 6)] == [whole[step] for step in (5, 6)]
    assert all(steps[step] != whole[step] for step in range(7, 14))
    changed, *others = events_of(RunDirectory(run), "order_changed")
    assert others == []
    assert sentence(changed) == (
        "attempt 2: the weights of the mixture are now odd 75%, even 25%; from step 7 on odd 0%, even 100%. Before, "
        "they were odd 75%, even 25%; from step 9 on odd 25%, even 75%"
    )
    assert changed["step"] == 5
