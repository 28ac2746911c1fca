"""Values that a script was given and that have no effect are in the history, each in a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterddp import protocol
from clusterddp.history.codec import sentence
from clusterddp.jobdef.job import Checkpointing
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.training import settings
from tests import ddp
from tests.histories import event_of
from tests.trainings import events_of

SCRIPT = """
import sys
import torch
from torch.utils.data import TensorDataset
import clusterddp
from tests.stops import request_stop

ctx = clusterddp.init(device="cpu", run_dir=sys.argv[1])
lr, batch, gamma, how = float(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5]
model = ctx.wrap(torch.nn.Linear(1, 1))
groups = [{"params": [p], "weight_decay": 0.1 * i} for i, p in enumerate(model.parameters())]
optimizer = torch.optim.SGD(groups if how == "groups" else model.parameters(), lr=lr)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma)
if how == "warmup":
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4))
loader = ctx.loader(TensorDataset(torch.ones(64, 1)), batch_size=batch)
run = ctx.run(model=model, optimizer=optimizer, loader=loader, scheduler=scheduler)
for (x,) in run.steps(6):
    if ctx.attempt < 2 and run.step == 2 * ctx.attempt + 1:
        request_stop(ctx)
    model(x).square().mean().backward()
    optimizer.step()
    scheduler.step()
"""


@pytest.mark.parametrize(
    ("how", "changed"),
    [
        ("plain", ["optimizer.lr", "scheduler.gamma", "loader.batch_size"]),
        ("warmup", ["optimizer.lr", "loader.batch_size"]),
        ("groups", ["optimizer.param_groups[0].lr", "optimizer.param_groups[1].lr", "scheduler.gamma", "loader.batch"]),
    ],
)
def test_values_that_a_resumed_script_gives_and_the_checkpoint_replaces_are_named_once(
    tmp_path: Path, how: str, changed: list[str]
) -> None:
    """A schedule has changed the learning rate since, which is no reason to name it."""
    (script := tmp_path / "given.py").write_text(SCRIPT)
    arguments = [("0.1", "4", "0.5"), ("0.3", "8", "0.9"), ("0.3", "8", "0.9")]
    for given, code in zip(arguments, (75, 75, 0), strict=True):
        ddp.start(script, tmp_path / "run", *given, how, ranks=1, folder=tmp_path / "out").expect(code)
    found = events_of(RunDirectory(tmp_path / "run"), "not_used")
    assert {event["attempt"] for event in found} == {1}
    assert len(found) == len(changed) and all(map(str.startswith, (event["what"] for event in found), changed))
    assert (found[0]["given"], found[0]["used"]) == (0.3, 0.1)
    assert all(sentence(event_of(event)) for event in found)


def test_a_batch_size_that_shares_the_same_global_batch_among_other_ranks_is_not_named(tmp_path: Path) -> None:
    """Every sample of the batch that was given is used."""
    (script := tmp_path / "given.py").write_text(SCRIPT)
    for ranks, batch, code in ((1, "8", 75), (2, "4", 75), (2, "8", 0)):
        ddp.start(script, tmp_path / "run", "0.1", batch, "0.5", "plain", ranks=ranks, folder=tmp_path / "out").expect(
            code
        )
    found = events_of(RunDirectory(tmp_path / "run"), "not_used")
    assert [(event["attempt"], event["given"], event["used"]) for event in found] == [(2, 8, 4)]


@pytest.mark.parametrize(
    ("job", "arguments", "used", "unused"),
    [
        ("seed: 7", {"seed": 1}, {"seed": 7}, ["seed"]),
        ("seed: 0", {"seed": 1}, {"seed": 0}, ["seed"]),
        ("seed: 7", {"seed": 7}, {"seed": 7}, []),
        ("job_name: a", {"seed": 1}, {"seed": 1}, []),
        ("job_name: a", {}, {"seed": 0}, []),
        ("backend: gloo", {"backend": "nccl"}, {"backend": "gloo"}, ["backend"]),
        ("job_name: a", {"backend": "nccl"}, {"backend": "nccl"}, []),
        ("job_name: a", {"device": "cuda:1"}, {"device": "cpu"}, ["device"]),
        ("job_name: a", {"checkpoint": Checkpointing(every_steps=7)}, {"seed": 0}, ["checkpoint"]),
    ],
)
def test_what_a_job_definition_sets_takes_precedence_over_the_arguments_of_init(
    run: RunDirectory, job: str, arguments: dict[str, Any], used: dict[str, Any], unused: list[str]
) -> None:
    """The user has written it for this run. A member of a sweep over seeds is such a run."""
    run.create()
    run.job_file.write_text(f"module: this\ndevice: cpu\n{job}\n")
    read = settings.read({protocol.RUN_DIR: str(run), protocol.ATTEMPT: "0", protocol.DEVICE: "cpu"}, **arguments)
    assert {name: getattr(read, name) for name in used} == used
    assert [event.what.partition("=")[0].removeprefix("init(") for event in read.unused] == unused
