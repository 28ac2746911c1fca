"""What a script does at run.every(), and with script_state= and best=, is exact wherever the run stops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from clusterddp.checkpoint.store import of_run
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.summary import BestSaved, best_saved
from tests import ddp
from tests.checkpoint_files import content_of
from tests.trainings import events_of
from tests.waiting import differing, flatten

EVALUATED = Path(__file__).parents[1] / "scripts" / "evaluated.py"
#: One after the other in the same run; the script ends by ``run.finish()``, in a step that evaluates.
POINTS = (
    *("trained@4", "before@5", "in first@5", "between@5", "in second@5", "after@5"),
    *("in second@10", "in first@15"),
)


def train(run: RunDirectory, *points: str, ranks: int = 2) -> list[ddp.Ranks]:
    """The run to its end, stopped at each of the points."""
    attempts = []
    for number in range(len(points) + 1):
        attempt = ddp.start(EVALUATED, run, *points, ranks=ranks, folder=run.path.with_name("out"))
        attempts.append(attempt.expect(75 if number < len(points) else 0))
    return attempts


def final(run: RunDirectory, rank: int) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    flatten("", torch.load(run.path / f"final-{rank}.pt", weights_only=True), flat)
    return flat


def lines(run: RunDirectory) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name not in ("time", "attempt")} for line in run.metrics()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    run = RunDirectory(tmp_path_factory.mktemp("whole") / "run")
    train(run)
    return run


def test_evaluations_schedulers_and_values_are_exact_at_every_stop(whole: RunDirectory, tmp_path: Path) -> None:
    """Before, in, between and after the evaluations of a step."""
    last = whole.metrics()[-1]["step"]
    points = (*POINTS, f"between@{last}", f"in second@{last}", f"trained@{last}")
    stopped = RunDirectory(tmp_path / "run")
    train(stopped, *points)
    assert lines(stopped) == lines(whole)
    for rank in range(2):
        assert differing(final(stopped, rank), final(whole, rank)) == []
    assert len(events_of(stopped, "resumed")) == len(points)
    assert [event["inexact"] for event in events_of(stopped, "resumed")] == [[]] * len(points)


def test_evaluations_come_after_each_epoch(whole: RunDirectory) -> None:
    """The run ends once three of them in a row were no better."""
    evaluated = [(line["step"], line["held_out_loss"]) for line in whole.metrics() if "held_out_loss" in line]
    steps = [step for step, _ in evaluated]
    assert steps == [*range(5, steps[-1] + 1, 5)]
    losses = [loss for _, loss in evaluated]
    assert min(losses[-3:]) > min(losses) and losses.index(min(losses)) == len(losses) - 4


def test_the_best_checkpoint_is_the_model_that_was_evaluated(whole: RunDirectory) -> None:
    """Under the number of the step that logged the value, and beside the newest."""
    evaluated = {line["step"]: line["held_out_loss"] for line in whole.metrics() if "held_out_loss" in line}
    best = min(evaluated, key=lambda step: evaluated[step])
    kept = {checkpoint.step: checkpoint for checkpoint in of_run(whole).candidates()}
    assert sorted(kept) == [best, whole.metrics()[-1]["step"] + 1]
    assert kept[best].metric("held_out_loss") == evaluated[best]
    content = content_of(kept[best].path)
    assert content["progress"]["step"] == best
    assert content["progress"]["values"]["history"] == [loss for step, loss in evaluated.items() if step < best]
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)).eval()
    net.load_state_dict(content["model"])
    torch.manual_seed(1)
    inputs = torch.randn(52, 3)[20:]
    loss = (net(inputs) - inputs.sum(1, keepdim=True)).square().mean().item()
    assert loss == pytest.approx(evaluated[best], rel=1e-5)
    [newest] = [event["best"] for event in events_of(whole, "checkpoint") if event["step"] == best]
    assert json.dumps(newest) == json.dumps({"held_out_loss": evaluated[best]})


LAST = """
import sys
import torch
import clusterddp

ctx = clusterddp.init(device="cpu", run_dir=sys.argv[1])
run = ctx.run(model=torch.nn.Linear(1, 1), best="score")
for _ in run.steps(3):
    if run.every(steps=2):
        run.log(score=0.5)
run.log(score=0.75)
"""


def test_a_best_value_behind_the_loop_is_in_the_history(tmp_path: Path) -> None:
    """The script may end at once: no step follows in which the save would be reported."""
    script, run = tmp_path / "last.py", RunDirectory(tmp_path / "run")
    script.write_text(LAST)
    ddp.run_alone(script, run, folder=tmp_path / "out")
    assert best_saved(run.history()) == BestSaved(3, "score", 0.75)
    assert {one.step: one.metric("score") for one in of_run(run).candidates()} == {2: 0.5, 3: 0.75}


ONLY_RANK_0 = """
import sys
import torch
from torch.utils.data import TensorDataset
import clusterddp

run_dir, how = sys.argv[1:]
ctx = clusterddp.init(device="cpu", run_dir=run_dir)
model = ctx.wrap(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = ctx.loader(TensorDataset(torch.ones(40, 1)), batch_size=2)
more = {"per_rank": torch.Generator(), "best": "score"} if how == "together" else {}
run = ctx.run(model=model, optimizer=optimizer, loader=loader, **more)
for (batch,) in run.steps(4):
    if ctx.is_main and run.every(steps=2):
        run.log(score=run.step)
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
"""
SAID = (
    "some ranks called run.every() more often than others (rank 0: 1 time, rank 1: 0 times). All ranks must call it in "
    "the same steps"
)


@pytest.mark.parametrize(("how", "code"), [("together", 1), ("alone", 0)])
def test_a_place_that_only_rank_0_asks_for_is_noticed_before_ranks_disagree(
    how: str, code: int, tmp_path: Path
) -> None:
    """With state per rank and a best checkpoint, rank 0 alone would begin a save of all ranks."""
    script, run = tmp_path / "train.py", RunDirectory(tmp_path / "run")
    script.write_text(ONLY_RANK_0)
    ranks = ddp.start(script, run, how, ranks=2, folder=tmp_path / "out")
    ranks.wait()
    assert (ranks.codes[0], SAID in ranks.output(0)) == (code, True), ranks.text()
    told = [event["explanation"].startswith(SAID) for event in events_of(run, "uneven_calls")]
    assert told == ([] if code else [True])
