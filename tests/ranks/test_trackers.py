"""TensorBoard, W&B and MLflow of a run that is preempted and killed: by the real packages, whose files are read."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests import packages, tracker_files
from tests.waiting import story

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = "tests/scripts/tracked.py"
SAVED, KILLED_AT, STEPS = 10, 37, 50
PREEMPTED_AT = 16
KILLED = 1  # the attempt


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Preempted; later its rank is killed, so that steps are repeated."""
    packages.require("tensorboard", "wandb", "mlflow", "alembic")
    folder = tmp_path_factory.mktemp("tracked")
    directory, database = RunDirectory(folder / "run"), f"sqlite:///{folder}/mlflow.db"
    from mlflow import MlflowClient

    MlflowClient(database).create_experiment("tests", artifact_location=str(folder / "artifacts"))
    command = [sys.executable, "-m", "clusterddp.submit", SCRIPT, "--local", "--device", "cpu", "--gpus", "1"]
    command += [
        "--run-dir",
        str(directory),
        "--preempt-after",
        str(PREEMPTED_AT),
        "--set",
        f"checkpoint.every={SAVED} steps",
    ]
    command += ["--set", "tensorboard=true", "--set", "wandb={project: tests, mode: offline}"]
    command += ["--set", f"mlflow={{experiment: tests, tracking_uri: '{database}'}}"]
    command += ["--", str(STEPS), str(KILLED), str(KILLED_AT)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert [event["event"] for event in directory.events()].count("requeued") == 1, story(directory)
    return directory


def test_tensorboard_has_each_counted_step_once_with_the_values_that_count(run: RunDirectory) -> None:
    """As TensorBoard's own reader has it after purging: the killed attempt's last steps are another attempt's."""
    lines = tracker_files.counted(run)
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert tracker_files.scalars(run, "by") == [(line["step"], line["by"]) for line in lines]
    assert tracker_files.scalars(run, "loss") == [(line["step"], numpy.float32(line["loss"])) for line in lines]


def test_steps_appear_in_tensorboard_before_their_checkpoint(run: RunDirectory) -> None:
    """The killed attempt had written steps that its successor repeated: purging had something to do."""
    (path,) = run.tensorboard.glob(f"*.attempt-{KILLED}")
    assert path.read_bytes().count(b"loss") > sum(line["by"] == KILLED for line in tracker_files.counted(run)) > 0


def test_wandb_has_each_counted_step_once_with_the_values_that_count(run: RunDirectory) -> None:
    """In the offline files of one W&B run, in the order in which `wandb sync` takes them."""
    files = tracker_files.in_wandb(run)
    rows = [row for _, rows in files for row in rows]
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
    assert [metric.timestamp for metric in history("loss")] == [round(line["time"] * 1000) for line in lines]
    assert (found.info.status, found.info.run_name, found.data.params["seed"]) == ("FINISHED", "run", "0")


def test_media_are_in_all_once_each_with_those_that_count(run: RunDirectory) -> None:
    """Every fifth step, also where a killed attempt had logged them before."""
    expected = [(line["step"], line["by"]) for line in tracker_files.counted(run) if line["step"] % 5 == 0]
    logged = [json.loads(line) for line in run.media_file.read_text().splitlines()]
    assert len(logged) > 3 * len(expected)
    shown = tracker_files.in_tensorboard(run)
    images = [(event.step, _pixel(event.encoded_image_string)) for event in shown.Images("drawn")]
    histograms = [(event.step, event.histogram_value.num) for event in shown.Histograms("weights")]
    assert images == expected
    assert tracker_files.texts(run, "said") == [(step, f"<by> {attempt}") for step, attempt in expected]
    assert histograms == [(step, 4) for step, _ in expected]
    for folder, rows in zip(sorted(run.wandb.glob("offline-run-*")), tracker_files.in_wandb(run), strict=True):
        found = [row for row in rows[1] if "drawn/path" in row or "drawn" in row]
        for row in found:
            assert expected.pop(0) == (row["_step"], row["by"])
            assert {"weights", "said", "drawn"} <= {name.split("/")[0] for name in row}
        assert len(list(folder.glob("files/media/images/*.png"))) == len(found)
    assert expected == []


def test_media_are_files_of_the_mlflow_run(run: RunDirectory) -> None:
    """Once each, in a folder for each name."""
    expected = [(line["step"], line["by"]) for line in tracker_files.counted(run) if line["step"] % 5 == 0]
    (folder,) = run.path.parent.glob("artifacts/*/artifacts/media")
    texts = [(folder / f"said/step-{step:012}.txt").read_text() for step, _ in expected]
    assert texts == [f"<by> {attempt}" for _, attempt in expected]
    assert len(list((folder / "said").iterdir())) == len(list((folder / "weights").iterdir())) == len(expected)
    assert [_pixel(path.read_bytes()) for path in sorted((folder / "drawn").iterdir())] == [by for _, by in expected]


def _pixel(content: bytes) -> int:
    from PIL import Image

    with Image.open(io.BytesIO(content)) as image:
        assert image.size == (4, 2)
        pixel = image.getpixel((0, 0))
    return int(pixel[0])


def test_status_says_how_to_see_the_run(run: RunDirectory) -> None:
    """The command that uploads all files of the W&B run, and TensorBoard's."""
    command = [sys.executable, "-m", "clusterddp", "status", str(run)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "200"})
    assert f"tensorboard --logdir {run.tensorboard}" in shown.stdout
    (name,) = {name for name, _ in tracker_files.in_wandb(run)}
    assert f"wandb sync {run.wandb}/offline-run-*-{name}" in shown.stdout
    assert f"run {tracker_files.in_mlflow(run)[0].info.run_id}" in shown.stdout
