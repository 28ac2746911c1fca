"""torch.compile chooses among its graphs by the order in which it saw shapes, which a resume changes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp
from tests.trainings import events_of

SCRIPT = """
import json, sys, torch, clusterddp
from torch import nn
from clusterddp.jobdef.job import Checkpointing
folder, stop, backend, options, sizes = sys.argv[1], int(sys.argv[2]), sys.argv[3], *map(json.loads, sys.argv[4:])
ctx = clusterddp.init(seed=1, device="cpu", run_dir=folder, checkpoint=Checkpointing(every_steps=None, every_s=None))
net = nn.Sequential(
    nn.Linear(32, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.1), nn.Unflatten(1, (4, 16)), nn.Conv1d(4, 8, 3),
    nn.BatchNorm1d(8), nn.Flatten(), nn.Linear(112, 64), nn.LayerNorm(64), nn.Softmax(-1), nn.Linear(64, 1),
) if backend == "inductor" else nn.Linear(32, 1)
compiled = net if backend == "none" else torch.compile(net, backend=backend, **options)
model = ctx.wrap(compiled)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
samples = torch.randn(400, 32, generator=torch.Generator().manual_seed(0))
run = ctx.run(model=model, optimizer=optimizer, loader=ctx.loader(samples, batch_size=24))
losses = []
for batch in run.steps(8):
    if run.every(steps=2):
        model.eval()
        with torch.no_grad():
            for size in sizes[ctx.rank]:
                compiled(samples[:size])
        model.train()
    if ctx.attempt == 0 and run.step == stop:
        run.stop("by the test")
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
if backend == "eager" and ctx.is_main:  # only it has compiled for a single shape
    shapes = run._state.shapes
    if "torch._dynamo.pgo" in sys.modules:
        assert not shapes._changed()
        del sys.modules["torch._dynamo.pgo"]  # as before torch 2.6
    assert shapes._changed()
torch.save({"losses": torch.tensor(losses[-4:]), **net.state_dict()}, f"{folder}/final-{ctx.rank}.pt")
"""
#: Since torch 2.6. Before it, a graph for training and one for evaluation are reported like changing shapes.
TORCH_RECORDS_SHAPES = importlib.util.find_spec("torch._dynamo.pgo") is not None
REASON = "torch.compile chooses among its graphs by the order in which it saw shapes"


def start(folder: Path, run: str, *arguments: object) -> ddp.Ranks:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return ddp.start(script, folder / run, *arguments, ranks=2, folder=folder / "out")


def test_changing_shapes_are_reported_when_they_are_seen_and_when_a_checkpoint_is_resumed(tmp_path: Path) -> None:
    """On rank 1 alone, in an evaluation: rank 0 hears of it before it saves."""
    start(tmp_path, "run", 4, "eager", "{}", "[[24], [25]]").expect(75)
    start(tmp_path, "run", 4, "none", "{}", "[[24], [25]]").expect(0)
    (told,) = events_of(RunDirectory(tmp_path / "run"), "shapes_changed")
    assert ("dynamic=False" if TORCH_RECORDS_SHAPES else "more than once") in told["explanation"]
    (resumed,) = events_of(RunDirectory(tmp_path / "run"), "resumed")
    assert (resumed["step"], resumed["inexact"]) == (4, [REASON])


def test_equal_shapes_are_not_reported(tmp_path: Path) -> None:
    """Graphs for training and evaluation, one of each; also the check of torch 2.4 and 2.5, which counts them."""
    start(tmp_path, "run", -1, "eager", "{}", "[[24], [24]]").expect(0)
    told = [event["explanation"] for event in events_of(RunDirectory(tmp_path / "run"), "shapes_changed")]
    assert ["more than once" in explanation for explanation in told] == ([] if TORCH_RECORDS_SHAPES else [True])


@pytest.mark.product  # compiling takes a minute
@pytest.mark.parametrize(
    ("options", "sizes", "inexact"),
    [
        ("{}", "[[10, 5], [10, 5]]", [REASON]),
        ('{"dynamic": false}', "[[10, 5], [10, 5]]", []),
        ("{}", "[[24], [24]]", []),
    ],
)
def test_a_compiled_model_that_is_evaluated_is_resumed_exactly_or_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, sizes: str, inexact: list[str]
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    start(tmp_path, "whole", -1, "inductor", options, sizes).wait(300).expect(0)
    start(tmp_path, "run", 4, "inductor", options, sizes).wait(300).expect(75)
    start(tmp_path, "run", 4, "inductor", options, sizes).wait(300).expect(0)
    (resumed,) = events_of(RunDirectory(tmp_path / "run"), "resumed")
    assert resumed["inexact"] == (inexact if TORCH_RECORDS_SHAPES else [REASON])
    for rank in range(2):
        one, other = (final(tmp_path / run, rank) for run in ("whole", "run"))
        same = all(torch.equal(one[name], other[name]) for name in one)
        assert same == (not inexact) or (same and not TORCH_RECORDS_SHAPES)


def final(run: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(run / f"final-{rank}.pt")
    return found
