"""The checkpoints alone: in one process without a process group, and under torchrun."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import clusterddp
from clusterddp.errors import CheckpointError, Superseded
from tests import ddp
from tests.wording import raises

SCRIPT = """
import os, sys, torch, torch.distributed as dist, torch.distributed.nn, clusterddp
if "RANK" in os.environ:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.Adam(model.parameters())
with clusterddp.CheckpointFolder(sys.argv[1], keep=2) as folder:
    step = folder.restore(model=model, optimizer=optimizer)
    print("begin", step)
    while step < int(sys.argv[2]):
        optimizer.zero_grad()
        model(torch.full((1, 4), float(step))).sum().backward()
        optimizer.step()
        step += 1
        folder.save(step, model=model, optimizer=optimizer)
print("sum", sum(p.detach().double().sum() for p in model.parameters()).item().hex())
if "RANK" in os.environ:
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_custom_loop_resumes_where_it_stopped(tmp_path: Path, ranks: int) -> None:
    """Alone, without a launcher, and with torchrun's variables."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def run(folder: str, steps: int) -> list[list[str]]:
        start = functools.partial(ddp.run, ranks=ranks) if ranks > 1 else ddp.run_alone
        ended = start(script, tmp_path / folder, steps, folder=tmp_path / "out")
        return [ended.output(rank).splitlines() for rank in range(ranks)]

    whole = run("whole", 7)
    assert [lines[0] for lines in run("parts", 4)] == ["begin 0"] * ranks
    second = run("parts", 7)
    assert [lines[0] for lines in second] == ["begin 4"] * ranks
    assert [lines[-1] for lines in second] == [lines[-1] for lines in whole] and second[0][-1].startswith("sum")
    names = sorted(path.name for path in (tmp_path / "parts" / "checkpoints").iterdir())
    assert names == [f"step-{step:012d}.attempt-1.safetensors" for step in (6, 7)]


def test_a_part_that_was_not_saved_and_a_newer_process_are_reported(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with clusterddp.CheckpointFolder(tmp_path / "folder") as first:
        assert first.restore(model=model) == 0
        first.save(3, model=model)
        saved = first.wait()
        assert saved is not None and saved.step == 3
        second = clusterddp.CheckpointFolder(tmp_path / "folder")
        with raises(CheckpointError):
            second.restore(model=model, optimizer=torch.optim.SGD(model.parameters()))
        first.save(4, model=model)
        with raises(Superseded):
            first.wait()
        second.close()


def test_what_was_saved_can_be_restored_in_the_same_process_and_in_the_next(tmp_path: Path) -> None:
    """As for an evaluation of the newest state: the process continues from what it started with."""
    model = torch.nn.Linear(2, 2)
    for begins_at in (0, 3):
        with clusterddp.CheckpointFolder(tmp_path / "folder") as folder:
            assert folder.restore(model=model) == begins_at
            folder.save(begins_at + 2, model=model)
            folder.wait()
            assert folder.restore(model=model) == begins_at + 2
            folder.save(begins_at + 3, model=model)


@pytest.mark.product  # the tests around it have the folder
def test_a_save_that_ignores_existing_checkpoints_is_refused_and_one_without_close_is_not_lost(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch, clusterddp\n"
        "folder, model = clusterddp.CheckpointFolder(sys.argv[1]), torch.nn.Linear(500, 500)\n"
        "if 'restore' in sys.argv: print('at', folder.restore(model=model))\n"
        "folder.save(int(sys.argv[2]), model=model)\n"
    )

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(script), str(tmp_path / "folder"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=100)

    assert "call restore() before save()" in run("1").stderr
    assert run("5", "restore").stdout == "at 0\n"
    assert run("6", "restore").stdout == "at 5\n"


def test_deleted_checkpoints_are_an_error(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    for step in (1, 2):
        with clusterddp.CheckpointFolder(tmp_path) as folder:
            assert folder.restore(model=model) == step - 1
            folder.save(step, model=model)
    for path in (tmp_path / "checkpoints").iterdir():
        path.unlink()
    with (
        clusterddp.CheckpointFolder(tmp_path) as folder,
        raises(CheckpointError),
    ):
        folder.restore(model=model)


def test_a_damaged_checkpoint_is_skipped_and_only_damaged_ones_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(2, 2)
    with clusterddp.CheckpointFolder(tmp_path) as folder:
        folder.restore(model=model)
        folder.save(1, model=model)
        folder.save(2, model=model)
    older, newer = sorted(Path(tmp_path / "checkpoints").iterdir())
    newer.write_bytes(newer.read_bytes()[:-1])
    with clusterddp.CheckpointFolder(tmp_path) as folder:
        assert folder.restore(model=model) == 1
    assert f"{newer.name} is damaged" in capsys.readouterr().err
    older.write_bytes(b"")
    with (
        clusterddp.CheckpointFolder(tmp_path) as folder,
        raises(CheckpointError),
    ):
        folder.restore(model=model)


def test_a_step_smaller_than_the_newest_checkpoint_is_refused(tmp_path: Path) -> None:
    """The next process would restore the newest one. The same step may be saved again, as after a loop."""
    model = torch.nn.Linear(1, 1, bias=False)

    def save(folder: clusterddp.CheckpointFolder, step: int, weight: float) -> None:
        torch.nn.init.constant_(model.weight, weight)
        folder.save(step, model=model)

    with clusterddp.CheckpointFolder(tmp_path, keep=1) as folder:
        folder.restore(model=model)
        save(folder, 10, 1.0)
        save(folder, 20, 2.0)
        with raises(ValueError):
            save(folder, 5, 3.0)
        save(folder, 20, 4.0)
    with clusterddp.CheckpointFolder(tmp_path, keep=1) as folder:
        assert (folder.restore(model=model), model.weight.item()) == (20, 4.0)
        with raises(ValueError):
            save(folder, 19, 5.0)
        save(folder, 20, 6.0)
    with clusterddp.CheckpointFolder(tmp_path) as folder:
        assert (folder.restore(model=model), model.weight.item()) == (20, 6.0)


@pytest.mark.parametrize(
    ("backend", "device"), [("cuda:nccl", "cuda:0"), ("nccl", "cuda:0"), ("cpu:gloo,cuda:nccl", "cpu"), ("gloo", "cpu")]
)
def test_the_folder_uses_a_gpu_only_in_a_group_without_a_backend_for_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, device: str
) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    monkeypatch.setattr("torch.distributed.get_backend_config", lambda: backend)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    assert str(clusterddp.CheckpointFolder(tmp_path)._device) == device
