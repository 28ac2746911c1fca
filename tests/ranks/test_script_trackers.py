"""Scripts that use W&B and MLflow themselves, and know nothing of clusterddp: attempts continue the same runs there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterddp import protocol
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.trackers.registry import TRACKERS
from tests import packages
from tests.waiting import story

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = "tests/scripts/own_trackers.py"


def used(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Which runs a rank used in each attempt."""
    return [json.loads(line) for line in (folder / f"used-{rank}.jsonl").read_text().splitlines()]


def submitted(folder: Path) -> RunDirectory:
    """The script on two ranks: rank 0 is killed in the first attempt."""
    run = RunDirectory(folder / "run")
    command = [sys.executable, "-m", "clusterddp.submit", SCRIPT, "--local", "--device", "cpu", "--gpus", "2"]
    command += ["--run-dir", str(run), "--", str(folder), "1"]
    environ = {**os.environ, "MLFLOW_TRACKING_URI": f"{folder}/mlflow", "MLFLOW_ALLOW_FILE_STORE": "true"}
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200, env=environ)
    assert done.returncode == 0, f"{done.stderr}\n{story(run)}"
    return run


@pytest.mark.product  # the tests below have the variables that the trackers get
def test_a_killed_script_continues_its_wandb_and_mlflow_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run in each, however many attempts: a rank gets what it began. No two ranks share a W&B run."""
    packages.require("wandb", "mlflow")
    run = submitted(tmp_path)
    first, second = used(tmp_path, 0)
    assert [first["WANDB_RESUME"], second["WANDB_RESUME"]] == ["allow", "allow"]
    assert first["wandb"] == second["wandb"] == first["WANDB_RUN_ID"] == run.tracker_id_file.read_text().strip()
    assert {attempt["wandb"] for attempt in used(tmp_path, 1)} == {f"{first['wandb']}-rank1"}
    assert first["MLFLOW_RUN_ID"] is None
    assert first["mlflow"] == second["mlflow"] == second["MLFLOW_RUN_ID"]
    assert {attempt["MLFLOW_RUN_ID"] for attempt in used(tmp_path, 1)} == {None}

    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient(f"{tmp_path}/mlflow")
    (found,) = client.search_runs([client.get_experiment_by_name("own").experiment_id])
    history = client.get_metric_history(found.info.run_id, "loss")
    assert (found.info.run_id, found.info.status) == (first["mlflow"], "FINISHED")
    assert [metric.step for metric in history] == list(range(6))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"WANDB_RUN_ID": "3f2a9c1e", "WANDB_RESUME": "allow", "MLFLOW_RUN_ID": "of-attempt-0"}),
        ({"WANDB_RUN_ID": "mine"}, {"WANDB_RUN_ID": "mine", "WANDB_RESUME": "allow", "MLFLOW_RUN_ID": "of-attempt-0"}),
        ({"WANDB_RESUME": "never"}, {"WANDB_RESUME": "never", "MLFLOW_RUN_ID": "of-attempt-0"}),
        ({"MLFLOW_RUN_ID": ""}, {"WANDB_RUN_ID": "3f2a9c1e", "WANDB_RESUME": "allow", "MLFLOW_RUN_ID": ""}),
    ],
)
def test_what_the_user_set_is_kept(given: dict[str, str], expected: dict[str, str], tmp_path: Path) -> None:
    """An empty MLFLOW_RUN_ID starts a new MLflow run in each attempt."""
    run = RunDirectory(tmp_path)
    run.create()
    (run.private / "mlflow-rank-0.json").write_text('{"run_id": "of-attempt-0"}')
    ours = {str(protocol.RUN_ID): "3f2a9c1e"}
    environ = {**ours, **given}
    for tracker in TRACKERS.values():
        environ |= tracker.variables(run, 0, environ)
    assert environ == {**ours, **expected}


def test_a_run_with_its_own_trackers_leaves_the_variables_alone(tmp_path: Path) -> None:
    """Two processes would write to the same W&B run. A script that logs there itself gets a new one in each attempt."""
    packages.require("wandb", "mlflow")
    script = tmp_path / "script.py"
    script.write_text("import os\nopen('seen', 'w').write(' '.join(os.environ))")
    command = [sys.executable, "-m", "clusterddp.submit", str(script), "--local", "--device", "cpu"]
    command += ["--run-dir", str(tmp_path / "run"), "--set", "wandb={mode: offline}", "--set", "mlflow=true"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    seen = set((tmp_path / "seen").read_text().split())
    assert seen & {"WANDB_RUN_ID", "WANDB_RESUME", "MLFLOW_RUN_ID"} == set()
