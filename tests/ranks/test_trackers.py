"""TensorBoard, W&B and MLflow of a run that is killed: by the real packages, whose files are read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests import packages, tracker_files
from tests.cli import clusterddp
from tests.preempting import preempting
from tests.waiting import story

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = "tests/scripts/tracked.py"
SAVED, KILLED_AT, STEPS = 10, 37, 50
FULL = "CLUSTERDDP_TEST_PRODUCT" in os.environ
#: In the full product attempt 0 is preempted at about that step, and attempt 1 is killed, else attempt 0.
PREEMPTED = [16] if FULL else []
KILLED = int(FULL)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Its rank is killed, so that steps are repeated."""
    packages.require("tensorboard", "wandb", "mlflow", "alembic")
    folder = tmp_path_factory.mktemp("tracked")
    directory, database = RunDirectory(folder / "run"), f"sqlite:///{folder}/mlflow.db"
    from mlflow import MlflowClient

    MlflowClient(database).create_experiment("tests", artifact_location=str(folder / "artifacts"))
    command = [sys.executable, "-m", "clusterddp.submit", SCRIPT, "--local", "--device", "cpu", "--gpus", "1"]
    command += ["--run-dir", str(directory), "--set", f"checkpoint.every={SAVED} steps"]
    command += ["--set", "tensorboard=true", "--set", "wandb={project: tests, mode: offline}"]
    command += ["--set", f"mlflow={{experiment: tests, tracking_uri: '{database}'}}"]
    command += ["--", str(STEPS), str(KILLED), str(KILLED_AT)]
    with preempting(*PREEMPTED):
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert [event["event"] for event in directory.events()].count("requeued") == FULL, story(directory)
    return directory


def test_tensorboard_has_each_counted_step_once_with_the_values_that_count(run: RunDirectory) -> None:
    """As TensorBoard's own reader has it after purging: the killed attempt's last steps are another attempt's."""
    lines = tracker_files.counted(run)
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert tracker_files.scalars(run, "final") == [(STEPS, 1.5)]
    assert tracker_files.scalars(run, "by") == [(line["step"], line["by"]) for line in lines]
    assert tracker_files.scalars(run, "loss") == [(line["step"], numpy.float32(line["loss"])) for line in lines]


def test_steps_appear_in_tensorboard_before_their_checkpoint(run: RunDirectory) -> None:
    """The killed attempt had written steps that its successor repeated: purging had something to do."""
    (path,) = (run.path / "tensorboard").glob(f"*.attempt-{KILLED}")
    assert path.read_bytes().count(b"loss") > sum(line["by"] == KILLED for line in tracker_files.counted(run)) > 0


def test_wandb_has_each_counted_step_once_with_the_values_that_count(run: RunDirectory) -> None:
    """In the offline files of one W&B run, in the order in which `wandb sync` takes them."""
    files = tracker_files.in_wandb(run)
    rows = [row for _, rows in files for row in rows]
    last = rows.pop()
    assert (last["_step"], last["final"]) == (STEPS, 1.5)
    lines = tracker_files.counted(run)
    assert [(row["_step"], row["loss"], row["by"]) for row in rows] == [
        (line["step"], line["loss"], line["by"]) for line in lines
    ]
    assert [row["_timestamp"] for row in rows] == pytest.approx([line["time"] for line in lines], rel=0, abs=1)
    assert len({name for name, _ in files}) == 1


def test_mlflow_has_each_counted_step_once_with_the_values_that_count(run: RunDirectory) -> None:
    """In one MLflow run, whose last attempt has ended it."""
    found, history = tracker_files.in_mlflow(run)
    lines = tracker_files.counted(run)
    for name in ("loss", "by"):
        assert [(metric.step, metric.value) for metric in history(name)] == [
            (line["step"], line[name]) for line in lines
        ]
    assert [(metric.step, metric.value) for metric in history("final")] == [(STEPS, 1.5)]
    assert [metric.timestamp for metric in history("loss")] == [round(line["time"] * 1000) for line in lines]
    assert (found.info.status, found.info.run_name, found.data.params["seed"]) == ("FINISHED", "run", "0")


def test_status_says_how_to_see_the_run(run: RunDirectory) -> None:
    """The command that uploads all files of the W&B run, and TensorBoard's."""
    shown = clusterddp("status", run, env={"COLUMNS": "200"})
    assert f"tensorboard --logdir {run.path}/tensorboard" in shown.stdout
    (name,) = {name for name, _ in tracker_files.in_wandb(run)}
    assert f"wandb sync {run.path}/wandb/offline-run-*-{name}" in shown.stdout
    assert f"run {tracker_files.in_mlflow(run)[0].info.run_id}" in shown.stdout
