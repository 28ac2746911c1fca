"""Hydra apps: one output folder for all ranks and attempts, sweeps by overrides, and the launcher of multiruns."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import clusterddp
from clusterddp.cli.command_line import command
from clusterddp.jobdef.load import load_resolved
from clusterddp.rundir.records import read_json
from clusterddp.rundir.run_directory import RunDirectory
from tests.packages import require
from tests.runs_on_disk import outcome_of
from tests.waiting import preempt_local, story, wait_until
from tests.wording import raises

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
APP = SCRIPTS / "with_hydra.py"
LOCAL = ("hydra/launcher=clusterddp", "hydra.launcher.local=true", "hydra.launcher.device=cpu")


@pytest.fixture(autouse=True)
def _hydra() -> None:
    require("hydra")


def trained(lr: float, steps: int = 20) -> float:
    """What the app returns."""
    value = 1.0
    for _ in range(steps):
        value *= 1 - lr
    return value


def multirun(
    folder: Path, *overrides: str, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(APP), "-m", *LOCAL, f"hydra.sweep.dir={folder}", *overrides]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS / "sweepers"), **(variables or {})}
    return subprocess.run(words, cwd=folder.parent, env=environment, capture_output=True, text=True, check=False)


def test_ranks_and_attempts_have_one_output_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the app finds its own save again; ${now:...} is when the run began, and each log has one writer."""
    monkeypatch.chdir(tmp_path)
    gate = tmp_path / "gate"
    handle = clusterddp.launch(
        APP, f"gate={gate}", "model.name='a=b, c'", local=True, device="cpu", gpus_per_node=2, run_dir=tmp_path / "run"
    )
    run = RunDirectory(handle.path)
    output = run.path / "hydra"
    wait_until(lambda: (read_json(output / "state.json") or {}).get("step") == 3, f"its saves\n{story(run)}")
    wait_until(lambda: (output / "with_hydra.rank-1.log").exists(), "rank 1's log")
    preempt_local(run)
    wait_until(lambda: len(run.attempts()) == 2, "the next attempt")
    gate.touch()
    assert handle.wait() == "completed", story(run)
    files = {str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()}
    configuration = {f".hydra/{name}.yaml" for name in ("config", "hydra", "overrides")}
    assert files == {*configuration, "with_hydra.log", "with_hydra.rank-1.log", "state.json"}
    assert not (tmp_path / "outputs").exists()
    starts = re.findall(r"starts at step (\d+), stamp (\d+), model (.*)", (output / "with_hydra.log").read_text())
    stamp = starts[0][1]
    assert starts == [("0", stamp, "'a=b, c'"), ("3", stamp, "'a=b, c'")]
    assert set(re.findall(r"stamp (\d+)", (output / "with_hydra.rank-1.log").read_text())) == {stamp}
    assert handle.result() == trained(0.1)


def test_a_sweep_of_a_hydra_app_writes_its_overrides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A member that raises is named with its exception; the user's own output folder is left as it is."""
    monkeypatch.chdir(tmp_path)
    sweep = ["--sweep", "model.lr=0.5,2", "--sweep", "model.name=a b", "--set", f"env.OWN={tmp_path}/own"]
    words = ["submit", str(APP), "--local", "--device", "cpu", "--run-dir", "runs", *sweep]
    assert command([*words, "--", "hydra.run.dir=${oc.env:OWN}/${model.lr}"]) == 1
    assert "model.lr is given to the script as model.lr=" in capfd.readouterr().err
    assert clusterddp.Handle("runs/lr=0.5,name=a-b-" + _ending(tmp_path)).result() == trained(0.5)
    assert (tmp_path / "own" / "0.5" / "state.json").exists()
    failed = next(path for path in (tmp_path / "runs").iterdir() if path.name.startswith("lr=2"))
    outcome = outcome_of(RunDirectory(failed)) or {}
    assert outcome["state"] == "failed" and outcome["reason"].endswith("raised ValueError: 2.0 is too much")


def _ending(folder: Path) -> str:
    (found,) = (folder / "runs").glob("lr=0.5*")
    return found.name.rpartition("-")[2]


@pytest.mark.product  # the test above has the sweep, the one below a member
def test_a_multirun_is_a_sweep_whose_sweeper_gets_each_result(tmp_path: Path) -> None:
    """Two batches, the second chosen by the first; a failed member has its exception. It alone is repeated."""
    words = ["hydra/sweeper=searching", "hydra.launcher.gpus_per_node=2", "steps=10"]
    done = multirun(tmp_path / "m", *words)
    assert done.returncode == 0, done.stderr
    first, failed, second = json.loads(done.stdout.splitlines()[-1])
    assert first == ["COMPLETED", trained(0.5, 10), 0.5] and second == ["COMPLETED", trained(0.25, 10), 0.25]
    assert failed[0] == "FAILED" and "ValueError: 2.0 is too much" in failed[1]
    members = [RunDirectory(tmp_path / "m" / "runs" / name) for name in "012"]
    assert all((tmp_path / "m" / run.path.name / ".hydra" / "config.yaml").exists() for run in members)
    again = multirun(tmp_path / "m", *words, "hydra.launcher.retry=[failed]")
    assert json.loads(again.stdout.splitlines()[-1])[0] == first, again.stderr
    assert [run.attempts() for run in members] == [[0], [0, 1], [0]]
    listed = subprocess.run(
        [sys.executable, "-m", "clusterddp", "list", tmp_path / "m" / "runs"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.search(r"LR=.*\n.*2 +completed +0.25(.*\n)+.*1 +failed +2", listed.stdout), listed.stdout


def test_a_member_is_the_program_as_it_was_started(tmp_path: Path) -> None:
    """A module, with the options that choose its configuration, and the launcher's keys as its job definition."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "other.yaml").write_text("defaults: [config]\nsteps: 1\n")
    config = ["--config-dir", "conf", "--config-name", "other"]
    words = [*LOCAL, "hydra.sweep.dir=m", "hydra.sweep.subdir='lr=${model.lr}'", "model.lr=0.5"]
    launcher = ["hydra.launcher.seed=3", "+hydra.launcher.env.MY_TOKEN=hidden"]
    command = [sys.executable, "-m", "with_hydra", "-m", *config, *words, *launcher]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    run = RunDirectory(tmp_path / "m" / "runs" / "0")
    job = load_resolved(run.job_file)
    assert (job.module, job.seed, job.env, job.hydra) == ("with_hydra", 3, {"MY_TOKEN": "hidden"}, True)
    assert set(job.args[:2]) == {"--config-dir=conf", "--config-name=other"} and "hidden" not in " ".join(job.args)
    assert clusterddp.Handle(run.path).result() == 0.5
    assert (tmp_path / "m" / "lr=0.5" / "state.json").samefile(run.path / "hydra" / "state.json")


@pytest.mark.product  # six processes that import Hydra
def test_a_multirun_that_cannot_be_is_one_sentence(tmp_path: Path) -> None:
    """And starts nothing."""
    for words, expected in {
        ("model.lr=0.1,0.2", "hydra.sweep.subdir=same"): "members 0 and 1 would have the same output folder",
        ("hydra.launcher.wait=false",): "hydra.launcher.wait=false cannot be combined with hydra.launcher.local=true",
        ("hydra.launcher.retry=[fialed]",): "hydra.launcher.retry: expected [failed], [cancelled] or both, got fialed",
        ("hydra.launcher.nodes=none",): "nodes: expected a whole number",
        ("hydra.launcher.time=600",): "Write '8:00:00' in quotes",
    }.items():
        done = multirun(tmp_path / "m", *words)
        assert done.returncode == 1 and expected in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "m" / "runs").exists()
    for name in "ab":
        done = multirun(tmp_path / "m", f"model.name={name}")
    assert done.returncode == 1 and "is a member with different overrides: args: model.name=a" in done.stderr, (
        done.stderr
    )


def test_a_multirun_inside_the_ranks_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with raises(clusterddp.errors.UsageError):
        command(["submit", str(APP), "--local", "--run-dir", str(tmp_path / "r"), "--", "-m", "steps=1,2"])
