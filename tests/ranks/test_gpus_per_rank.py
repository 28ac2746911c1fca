"""Several GPUs per rank: what each rank is shown in local runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import clusterddp
from clusterddp.rundir.run_directory import RunDirectory
from tests.conftest import Launch
from tests.waiting import story, wait_for_outcome
from tests.wording import says

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = "tests/scripts/gpus_seen.py"
SHARED = ["--set", "gpus_per_rank=2"]


def seen(run: RunDirectory) -> list[str]:
    """What each rank says: rank, local rank, local world size, CUDA_VISIBLE_DEVICES."""
    assert wait_for_outcome(run) == "completed", story(run)
    logs = sorted(run.attempt_logs(0).glob("rank-*.out"))
    return [log.read_text().strip() for log in logs]


def local(run: RunDirectory, *options: str, visible: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "clusterddp", "submit", SCRIPT, "--local", "--run-dir", str(run), *options]
    # A user's own choice of GPUs, or none.
    command = ["env", "-u", "CUDA_VISIBLE_DEVICES", *([f"CUDA_VISIBLE_DEVICES={visible}"] if visible else []), *command]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("shape", "visible", "expected"),
    [
        pytest.param(["--gpus", "4", *SHARED], None, ["0 0 2 none", "1 1 2 none"], marks=pytest.mark.product),
        (
            ["--nodes", "2", "--gpus", "4", *SHARED],
            None,
            ["0 0 2 0,1,2,3", "1 1 2 0,1,2,3", "2 0 2 4,5,6,7", "3 1 2 4,5,6,7"],
        ),
        (["--nodes", "2", "--gpus", "1"], "3,GPU-5", ["0 0 1 3", "1 0 1 GPU-5"]),
        pytest.param(
            ["--nodes", "2", "--gpus", "2", "--device", "cpu", *SHARED],
            None,
            ["0 0 1 none", "1 0 1 none"],
            marks=pytest.mark.product,
        ),
    ],
)
def test_each_local_node_has_its_own_share_of_this_machines_gpus(
    tmp_path: Path, shape: list[str], visible: str | None, expected: list[str]
) -> None:
    """So that a script's cuda:LOCAL_RANK is another GPU on each."""
    run = RunDirectory(tmp_path / "run")
    done = local(run, *shape, visible=visible)
    assert done.returncode == 0, done.stderr
    assert seen(run) == expected


def test_gpus_that_cannot_be_shared_start_nothing(tmp_path: Path) -> None:
    done = local(RunDirectory(tmp_path / "run"), "--gpus", "5", *SHARED)
    assert done.returncode == 2
    says(done.stderr)
    assert not (tmp_path / "run").exists()


def test_without_gpus_each_device_of_a_rank_is_the_cpu(launch: Launch) -> None:
    """Four of them are two ranks of two, as they would be GPUs; the model's parts stay where the script put them."""

    def train() -> tuple[int, list[str], int]:
        ctx = clusterddp.init()
        model = ctx.wrap(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = ctx.run(model=model, optimizer=optimizer, loader=ctx.loader(torch.ones(8, 2), batch_size=2))  # type: ignore[arg-type]
        for batch in run.steps(3):
            model(batch).sum().backward()
            optimizer.step()
        return ctx.world_size, [str(device) for device in ctx.devices], run.step

    handle = launch(train, gpus_per_node=4, gpus_per_rank=2)
    assert handle.result(all_ranks=True) == [(2, ["cpu", "cpu"], 3)] * 2


def test_in_an_allocation_its_tasks_are_the_ranks(tmp_path: Path) -> None:
    """``--here`` cannot make one of two."""
    allocation = ["SLURM_JOB_ID=7", "SLURM_JOB_NUM_NODES=1", "SLURM_NTASKS_PER_NODE=4", "SLURM_TASKS_PER_NODE=4"]
    command = [
        "env",
        *allocation,
        sys.executable,
        "-m",
        "clusterddp",
        "submit",
        SCRIPT,
        "--here",
        "--run-dir",
        str(tmp_path / "run"),
        *SHARED,
    ]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    says(done.stderr)
    assert not (tmp_path / "run").exists()
