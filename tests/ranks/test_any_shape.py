"""Runs of any shape on two ranks, stopped and resumed: no loader, state per rank, a frozen teacher, a warm start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from clusterddp.checkpoint.export import export
from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp
from tests.checkpoint_files import content_of
from tests.trainings import events_of

SCRIPT = """
import random, sys
import numpy, torch
import clusterddp
from tests.stops import request_stop
from clusterddp.jobdef.job import Checkpointing

run_dir, total, stops, options = sys.argv[1], int(sys.argv[2]), sys.argv[3].split(","), sys.argv[4:]
ctx = clusterddp.init(device="cpu", seed=3, run_dir=run_dir, checkpoint=Checkpointing(every_steps=4))

class World:
    '''An environment of this rank's own, whose history is as long as the rank likes.'''
    def __init__(self, rank):
        self.place, self.path = torch.full((4,), float(rank)), []
    def move(self, push):
        self.place = 0.9 * self.place + push
        self.path += [self.place] * (1 + ctx.rank)
    def state_dict(self):
        return {"place": self.place, "path": torch.stack(self.path) if self.path else torch.empty(0, 4)}
    def load_state_dict(self, state):
        self.place, self.path = state["place"], list(state["path"])

class SplitWorld(World):
    def load_state_dicts(self, states, rank, world_size):
        print("split", len(states), "states for rank", rank, "of", world_size, flush=True)
        self.load_state_dict({"place": states[0]["place"], "path": torch.cat([state["path"] for state in states])})

own = numpy.random.default_rng(100 + ctx.rank)  # differs by rank, and is no function of the step
common, plain = torch.Generator().manual_seed(7), random.Random(ctx.rank)
world = (SplitWorld if "split" in options else World)(ctx.rank)
teacher = torch.nn.Linear(4, 2).requires_grad_(False)
student = ctx.wrap(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)))
policy = ctx.wrap(torch.nn.Linear(4, 4))
optimizers = {"student": torch.optim.Adam(student.parameters()), "policy": torch.optim.SGD(policy.parameters(), lr=0.1)}
warm = {"init_from": {"nets.2": options[1]}} if options[:1] == ["warm"] else {}
own_parts = {"world": world, "random": [own, plain]}
if "fewer" in options:
    del own_parts["random"]
if "uneven" in options and ctx.rank == 1:
    own_parts = None
run = ctx.run(nets=[student, policy, teacher], optimizers=optimizers, common=common, per_rank=own_parts, **warm)
for step in run.steps(total):
    assert step == run.step
    if run.every(steps=4) and (ctx.attempt, step) == (2, 12):
        run.stop("in an evaluation")
    if str(step) in stops and ctx.rank == 1:
        request_stop(ctx)
    push = torch.from_numpy(own.normal(size=4)).float() + plain.random() + torch.rand(4, generator=common)
    world.move(push + policy(world.place).detach())
    optimizers["policy"].zero_grad()
    (policy(world.place) - torch.stack(world.path).mean(0)).square().mean().backward()
    optimizers["policy"].step()
    batch = world.place + torch.rand(6, 4)
    with torch.no_grad():
        wanted = teacher(batch)
    optimizers["student"].zero_grad()
    torch.nn.functional.mse_loss(student(batch), wanted).backward()
    optimizers["student"].step()
    run.log(place=world.place.sum(), length=len(world.path))
print("ended with", world.place.tolist(), len(world.path), own.integers(1 << 30), plain.random(), flush=True)
if ctx.is_main:
    torch.save([student.state_dict(), policy.state_dict(), optimizers["student"].state_dict()], f"{run_dir}/final.pt")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shapes")


@pytest.fixture(scope="module")
def script(folder: Path) -> Path:
    path = folder / "shapes.py"
    path.write_text(SCRIPT)
    torch.save({"module.weight": torch.ones(2, 4), "module.bias": torch.zeros(2)}, folder / "teacher.pt")
    return path


@pytest.fixture(scope="module")
def stopped(folder: Path, script: Path) -> tuple[Path, ddp.Ranks]:
    """A run of 13 steps, stopped after 6 and 11 (or one more), and in an evaluation; the output of its last attempt."""
    run, arguments = folder / "run", ("warm", folder / "teacher.pt")
    for _ in range(3):
        ddp.start(script, run, 13, "5,10", *arguments, ranks=2, folder=folder / "out").expect(75)
    (folder / "teacher.pt").rename(folder / "moved.pt")  # a resume does not need it
    last = ddp.run(script, run, 13, "-1", *arguments, ranks=2, folder=folder / "out")
    (folder / "moved.pt").rename(folder / "teacher.pt")
    return run, last


def ended(ranks: ddp.Ranks) -> list[list[str]]:
    return [
        [line for line in ranks.output(rank).splitlines() if line.startswith("ended")] for rank in range(2)
    ]  # the environments and generators of each rank


def test_without_a_loader_and_with_state_per_rank_a_resume_is_exact(folder: Path, script: Path, stopped: Any) -> None:
    """Two models, two optimizers and a frozen teacher in lists and dicts; environments and generators of each rank."""
    run, last = stopped
    whole = ddp.run(script, folder / "whole", 13, "-1", "warm", folder / "teacher.pt", ranks=2, folder=folder / "out")
    assert ended(last) == ended(whole) and ended(last)[0] != ended(last)[1]
    one, other = ((path / "final.pt").read_bytes() for path in (run, folder / "whole"))
    assert one == other
    resumed = events_of(RunDirectory(run), "resumed")
    assert [event["inexact"] for event in resumed] == [[], [], []]
    lines = [
        [(line["step"], line["place"]) for line in RunDirectory(path).metrics()] for path in (run, folder / "whole")
    ]
    assert lines[0] == lines[1] and len(lines[0]) == 13


def test_a_warm_start_is_recorded_once_and_a_checkpoint_wins(stopped: Any, folder: Path) -> None:
    """The names in the file have DDP's prefix."""
    run, _ = stopped
    (started,) = events_of(RunDirectory(run), "initialized")
    assert (started["part"], started["missing"], started["unexpected"]) == ("nets.2", [], [])
    assert started["file"] == str(folder / "teacher.pt")
    newest = content_of(max((run / "checkpoints").glob("step-*")))
    assert newest["nets.2"]["weight"].eq(1).all()


def test_checkpoints_hold_the_state_of_all_ranks(stopped: Any) -> None:
    """Also of different sizes; a run keeps its checkpoints at steps known to all ranks."""
    run, _ = stopped
    newest = content_of(max((run / "checkpoints").glob("step-*")))
    paths = [state["world"]["path"] for state in newest["progress"]["per_rank"]]
    assert [len(path) for path in paths] == [13, 26]


def test_the_only_module_is_exported_without_a_name(folder: Path, tmp_path: Path) -> None:
    """The run has no optimizer either."""
    script = tmp_path / "alone.py"
    script.write_text(
        "import sys, torch, clusterddp\n"
        "ctx = clusterddp.init(device='cpu', run_dir=sys.argv[1])\n"
        "net = torch.nn.Linear(2, 1)\n"
        "run = ctx.run(net=net, state=torch.Generator())\n"
        "for step in run.steps(2): pass\n"
        "for name in ('epoch', 'end_of_epoch'):\n"
        "    try: getattr(run, name)\n"
        "    except TypeError as error: print(error)\n"
    )
    done = ddp.run_alone(script, tmp_path / "run", folder=tmp_path / "out")
    assert done.output(0).count("is not available without a loader") == 2
    assert "net of checkpoint 2" in export(RunDirectory(tmp_path / "run"), tmp_path / "net.pt")


def test_state_per_rank_that_does_not_fit_is_refused(folder: Path, script: Path, stopped: Any) -> None:
    """On another number of ranks, with other names than the checkpoint, and with other names on some ranks."""
    run, _ = stopped
    refused = ddp.start(script, run, 14, "-1", ranks=1, folder=folder / "out").expect(1)
    assert (
        "the checkpoint has the state of world for 2 ranks, but the world size is now 1. Use 2 ranks, or give world "
        "a method load_state_dicts(states, rank, world_size) that takes over a rank's share of all states"
    ) in refused.output(0)
    refused = ddp.start(script, folder / "uneven", 14, "-1", "uneven", ranks=2, folder=folder / "out").expect(1)
    assert (
        "run(per_rank=...): rank 1 has nothing, but rank 0 has random.0, random.1, world. All ranks save together. "
        "Pass the same names on every rank"
    ) in refused.output(1)
    refused = ddp.start(script, run, 14, "-1", "fewer", ranks=2, folder=folder / "out").expect(1)
    assert (
        "ctx.run(per_rank=...) received world, but the checkpoint has random.0, random.1, world. "
        "Pass the parts that the run started with, or start a new run"
    ) in refused.output(0)
