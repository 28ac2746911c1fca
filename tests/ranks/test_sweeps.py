"""Sweeps on this machine: the members train one after another."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import clusterddp
from clusterddp.cli.command_line import command
from clusterddp.errors import UsageError
from clusterddp.rundir.run_directory import RunDirectory
from tests.wording import raises, says

SCRIPT = "import sys; print(*sys.argv[1:]); assert sys.argv[-1] != '1'\n"


def attempts(folder: Path) -> dict[str, int]:
    return {path.parent.name: len(RunDirectory(path.parent).attempts()) for path in sorted(folder.glob("*/job.yaml"))}


def test_the_members_run_one_after_another_and_those_that_failed_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same command does nothing then; with --retry it runs what failed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "seeds.yaml").write_text("job: {script: train.py, device: cpu}\ngrid: {args.seed: 0..2}\n")
    assert command(["submit", "seeds.yaml", "--local", "--", "--epochs", "3"]) == 1
    assert "failed: seed=1. To run failed members again, use --retry failed" in capfd.readouterr().err
    folder = tmp_path / "runs" / "seeds"
    printed = [path.read_text() for path in sorted(folder.glob("*/logs/attempt-0/rank-0.out"))]
    assert printed == [f"--epochs 3 --seed {seed}\n" for seed in range(3)]
    assert command(["submit", "seeds.yaml", "--local", "--", "--epochs", "3"]) == 1
    assert attempts(folder) == {"seed=0": 1, "seed=1": 1, "seed=2": 1}
    (tmp_path / "train.py").write_text("")
    assert command(["submit", "seeds.yaml", "--local", "--retry", "failed", "--", "--epochs", "3"]) == 0
    assert attempts(folder) == {"seed=0": 1, "seed=1": 2, "seed=2": 1}


CANCELLED = """import os, signal, subprocess, sys
subprocess.Popen([sys.executable, "-m", "clusterddp", "cancel", os.environ["CLUSTERDDP_RUN_DIR"]])
signal.pause()
"""
DONE = 'import os; open(os.environ["CLUSTERDDP_RUN_DIR"] + "/done", "w")\n'


def test_a_cancelled_member_trains_again_only_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is not named as one that failed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(CANCELLED)
    job = 'job: {script: train.py, device: cpu, done: "{run_dir}/done"}'
    (tmp_path / "seeds.yaml").write_text(f"{job}\ngrid: {{args.seed: 0}}\n")
    folder = tmp_path / "runs" / "seeds"
    assert command(["submit", "seeds.yaml", "--local"]) == 1
    said = capfd.readouterr().err
    assert "failed" not in said
    says(said)
    (tmp_path / "train.py").write_text(DONE)
    assert command(["submit", "seeds.yaml", "--local"]) == 0
    assert attempts(folder) == {"seed=0": 1}
    assert command(["submit", "seeds.yaml", "--local", "--retry", "cancelled"]) == 0
    assert attempts(folder) == {"seed=0": 2}


def scaled(factor: int, *, lr: float, sizes: tuple[int, ...]) -> tuple[float, tuple[int, ...], str]:
    """What each rank of a member returns."""
    return factor * lr, sizes, os.environ["RANK"]


def test_a_function_is_called_with_the_values_of_each_member(tmp_path: Path) -> None:
    """Their handles come in the order of the grid; the same call starts nothing again."""
    grid: Mapping[str, list[object]] = {"lr": [0.5, 0.25], "sizes": [(8, 4)]}
    for _ in range(2):
        handles = clusterddp.sweep(scaled, grid, 2, device="cpu", local=True, run_dir=tmp_path / "s")
        assert [handle.result() for handle in handles] == [(1.0, (8, 4), "0"), (0.5, (8, 4), "0")]
    assert list(attempts(tmp_path / "s").values()) == [1, 1]


@pytest.mark.parametrize(
    "grid", [{"data": [sys]}, [{"lr": 1}, {"lr": 1}], {}], ids=["a module", "the same twice", "nothing"]
)
def test_values_that_cannot_name_a_run_are_refused(tmp_path: Path, grid: dict[str, list[object]]) -> None:
    with raises(UsageError):
        clusterddp.sweep(scaled, grid, local=True, run_dir=tmp_path / "s")
    assert not (tmp_path / "s").exists()
