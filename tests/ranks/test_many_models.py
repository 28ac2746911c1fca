"""Several wrapped models and optimizers in one run, with and without gradients in a phase, stopped and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from clusterddp.checkpoint.export import export
from clusterddp.errors import CheckpointError
from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp
from tests.checkpoint_files import content_of
from tests.trainings import events_of
from tests.wording import raises

SCRIPT = """
import contextlib, sys
import torch, clusterddp
from torch.nn import BatchNorm1d, Linear, ReLU, Sequential
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset
from clusterddp.jobdef.job import Checkpointing

run_dir, total, stop, how = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
ctx = clusterddp.init(device="cpu", seed=5, run_dir=run_dir, checkpoint=Checkpointing(every_steps=5))
points = TensorDataset(torch.rand(64, 3, generator=torch.Generator().manual_seed(0)))

class Branches(torch.nn.Module):
    '''Each step uses one of three layers, the last of them only on rank 1.'''
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Linear(3, 1) for _ in range(3))
        self.shared = Linear(3, 3)
    def forward(self, x, step):
        branch = 1 + ctx.rank if step % 2 else 0
        return self.layers[branch](self.shared(x))

generator = ctx.wrap(Sequential(Linear(2, 8), BatchNorm1d(8), ReLU(), Linear(8, 3)))
net = Sequential(Linear(3, 8), BatchNorm1d(8), ReLU(), Linear(8, 1))
discriminator = ctx.wrap(net, find_unused_parameters=how == "views")
branches = ctx.wrap(Branches(), find_unused_parameters=True, gradient_as_bucket_view=how == "views")
make = torch.optim.Adam(generator.parameters(), lr=0.01)
judge = torch.optim.Adam(discriminator.parameters(), lr=0.01)
slow = torch.optim.Adam(branches.parameters(), lr=0.05)
run = ctx.run(
    generator=generator, discriminator=discriminator, branches=branches, optimizers=(make, judge, slow),
    loader=ctx.loader(points, batch_size=4),
)
def evaluate():
    generator.eval(), discriminator.eval()
    with torch.no_grad():
        scores = [discriminator.module(x).sum() for (x,) in ctx.eval_loader(points, batch_size=16)]
        score = ctx.all_reduce_sum(sum(scores)) + ctx.all_reduce_sum(generator.module(torch.ones(2, 2)).sum())
    generator.train(), discriminator.train()
    return score

def fake(count):
    return generator(torch.randn(count, 2))

for (real,) in run.steps(total):
    here = ctx.attempt == 0 and run.step == stop
    if here and how in ("after", "views"):
        run.stop("after the last step")
    if here and how == "before":
        evaluate(), ctx._agreement.request("here"), run.stop("in the first evaluation")
    run.log(score=evaluate())
    for _ in range(2):  # two forwards, one backward
        with torch.no_grad():
            made = fake(len(real))
        loss = softplus(-discriminator(real)).mean() + softplus(discriminator(made)).mean()
        judge.zero_grad()
        loss.backward()
        judge.step()
    if here and how == "between":
        run.stop("between two optimizers")
    discriminator.requires_grad_(False)  # the wrapped model itself
    make.zero_grad()
    softplus(-discriminator(fake(len(real)))).mean().backward()
    make.step()
    discriminator.requires_grad_(True)
    branches(real, run.step).square().mean().backward()
    if run.step % 3 == 2:
        slow.step()
        slow.zero_grad()
    run.log(loss=loss)
if ctx.is_main:
    parts = {"g": generator, "d": discriminator, "b": branches, "make": make, "judge": judge, "slow": slow}
    torch.save({name: part.state_dict() for name, part in parts.items()}, f"{run_dir}/final.pt")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def script(folder: Path) -> Path:
    path = folder / "gan.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def whole(folder: Path, script: Path) -> Path:
    ddp.run(script, folder / "whole", 10, -1, "after", ranks=2, folder=folder / "out")
    return folder / "whole"


def facts(run: Path) -> list[dict[str, Any]]:
    lines = RunDirectory(run).metrics()
    return [{name: line[name] for name in ("step", "loss", "score")} for line in lines]


@pytest.mark.parametrize(
    ("how", "stop"),
    [
        ("after", 4),  # one backward of the third model waits: each rank has used another layer
        ("views", 5),  # two do, with gradients in DDP's buckets
        ("before", 6),  # in an evaluation before any optimizer has stepped, and none waits
    ],
)
def test_models_with_optimizers_of_their_own_resume_exactly(
    folder: Path, script: Path, whole: Path, how: str, stop: int
) -> None:
    """A GAN whose discriminator is frozen in the other phase, BatchNorm in both, and gradients that a third model
    accumulates over three steps while some of its parameters are unused."""
    run = folder / how
    ddp.start(script, run, 10, stop, how, ranks=2, folder=folder / "out").expect(75)
    ddp.run(script, run, 10, stop, how, ranks=2, folder=folder / "out")
    (resumed,) = events_of(RunDirectory(run), "resumed")
    assert (resumed["step"], resumed["inexact"]) == (stop, [])
    assert facts(run) == facts(whole)
    assert (run / "final.pt").read_bytes() == (whole / "final.pt").read_bytes()


def test_a_stop_between_two_optimizers_keeps_the_step_and_names_the_others(folder: Path, script: Path) -> None:
    """The step before is lost as soon as one of them has stepped."""
    run = folder / "between"
    ddp.start(script, run, 8, 6, "between", ranks=2, folder=folder / "out").expect(75)
    ddp.run(script, run, 8, 6, "between", ranks=2, folder=folder / "out")
    (resumed,) = events_of(RunDirectory(run), "resumed")
    assert resumed["step"] == 7
    assert resumed["inexact"] == [
        "step 6 was stopped during an evaluation, and the rest of its code did not run, including the optimizer steps "
        "of optimizers.0, optimizers.2"
    ]


def test_a_checkpoint_holds_only_gradients_that_wait(whole: Path) -> None:
    """Those of the third model: the others have stepped."""
    found = content_of(whole / "checkpoints" / "step-000000000005.attempt-0.safetensors")
    assert {name for name, gradients in found["progress"]["gradients"].items() if gradients} == {"branches"}


def test_one_of_several_models_is_exported_by_name(whole: Path, tmp_path: Path) -> None:
    """Without a name it would be a guess."""
    run = RunDirectory(whole)
    with raises(CheckpointError):
        export(run, tmp_path / "model.pt")
    assert "generator of checkpoint 10" in export(run, tmp_path / "model.pt", "generator")
    exported = torch.load(tmp_path / "model.pt", weights_only=True)
    final = torch.load(whole / "final.pt", weights_only=True)["g"]
    assert all(torch.equal(value, final[f"module.{name}"]) for name, value in exported.items())


def test_a_model_that_does_not_train_needs_no_ddp(tmp_path: Path) -> None:
    """The error says what to do with it."""
    script = tmp_path / "teacher.py"
    script.write_text(
        "import torch, clusterddp\nclusterddp.init(device='cpu').wrap(torch.nn.Linear(1, 1).requires_grad_(False))\n"
    )
    failed = ddp.start(script, ranks=1, folder=tmp_path / "out").expect(1)
    assert "wrap() received a module of type Linear in which no parameter requires a gradient" in failed.output(0)
    assert "as in teacher.to(ctx.device)" in failed.output(0)
