"""Trackers: which lines a tracker gets, once each; what it lacks; that its failure is reported and stops nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterddp.errors import RunDirectoryError, Superseded, UsageError
from clusterddp.history.steps import Tracker
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.tracking import check_packages, config, wanted
from clusterddp.process import descendants
from clusterddp.rundir.files import write_json
from clusterddp.rundir.metrics_lines import counts
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.trackers import delivery
from clusterddp.trackers.__main__ import send_rest
from clusterddp.trackers.delivery import Lines, Sent, read_sent, write_sent
from clusterddp.trackers.follower import Follower
from clusterddp.trackers.mlflow import Mlflow
from clusterddp.trackers.registry import TRACKERS, overview
from clusterddp.trackers.wandb import Wandb
from clusterddp.training.metrics import Tracking
from tests import packages, tracker_files
from tests.histories import happened
from tests.wording import raises


def test_a_tracker_needs_only_its_own_package() -> None:
    """Each package is an extra of its own. Without two of them, the third still got no values."""
    others = "import sys; sys.modules.update(dict.fromkeys(['wandb', 'mlflow', 'tensorboard']))"
    subprocess.run([sys.executable, "-c", f"{others}; import clusterddp.trackers.follower"], check=True)


#: A tracker, whose module is all that there is of it.
MEMO = """
from clusterddp.keys.kinds import TEXT
from clusterddp.trackers.tracker import Tracker

class Memo(Tracker):
    key, name, kind = "memo", "Memo", TEXT
    meaning, files = "Where to write.", "Notes."
    variables_of_script = ("MEMO_ID",)

    def open(self, folder, sent, options):
        raise NotImplementedError

TRACKER = Memo()
"""
#: Finds it, and uses it as a key.
FIND = """
import sys
from clusterddp import trackers
trackers.__path__.append(sys.argv[1])
from clusterddp.jobdef.json_schema import job_schema
from clusterddp.jobdef.differences import list_differences
from clusterddp.jobdef.load import from_values
job = from_values({"module": "train", "memo": "here"})
assert job.trackers == {"memo": "here"} and "memo: here" in job.to_yaml()
assert list_differences(from_values({"module": "train"}), job) == ["memo: none recorded, here given"]
assert job_schema()["properties"]["memo"]["description"] == "Where to write."
"""


def test_a_module_is_all_that_a_tracker_needs(tmp_path: Path) -> None:
    """The registry finds it, and its key is read, written, compared and described like all others."""
    (tmp_path / "memo.py").write_text(MEMO)
    subprocess.run([sys.executable, "-c", FIND, str(tmp_path)], check=True)


def test_every_tracker_has_an_extra_of_its_name() -> None:
    """Which installs its packages, and which the tests of all trackers include."""
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    (together,) = re.findall(r"^trackers = .*\[(.*)\]\"\]$", text, re.MULTILINE)
    assert {*together.split(",")} == {*TRACKERS}
    assert all(re.search(f"^{key} = ", text, re.MULTILINE) for key in TRACKERS)


@pytest.fixture
def run(run: RunDirectory) -> RunDirectory:
    (run.path / "wandb").mkdir()
    (run.path / "tensorboard").mkdir()
    return run


def attempt(run: RunDirectory, first: int, *steps: int) -> int:
    """An attempt that resumed at step ``first``, and its metrics."""
    number = run.create_attempt()
    write_json(run.resume_record(number), {"step": first, "parent": None})
    append(run, number, *steps)
    return number


def append(run: RunDirectory, number: int, *steps: int) -> None:
    with open(run.metrics_file, "a") as file:
        for step in steps:
            print(json.dumps({"step": step, "time": 100.5 + step, "attempt": number, "loss": step / 2}), file=file)


class Memory:
    """A tracker that keeps what it gets."""

    def __init__(self, first: int = 0) -> None:
        self.first = first
        self.steps: list[int] = []
        self.safe: list[int | None] = []

    def add(self, step: int, at: float, values: Mapping[str, float]) -> None:
        assert (at, values) == (100.5 + step, {"loss": step / 2})
        self.steps.append(step)

    def flush(self, step: int | None) -> Sent:
        self.safe.append(step)
        return Sent(max([0, *(safe for safe in self.safe if safe is not None)]))

    def close(self, step: int, clean: bool) -> Sent:
        return Sent(step)


# --- which lines


def test_only_steps_below_a_checkpoint_are_sent_unless_the_tracker_is_live(run: RunDirectory) -> None:
    """And each once, as rank 0 appends more."""
    number = attempt(run, 0, 0, 1, 2, 3)
    trackers = {live: Memory() for live in (True, False)}
    followers = [Follower(run, number, run.path / "wandb", tracker, live) for live, tracker in trackers.items()]
    for committed in (0, 2, 2):
        for follower in followers:
            follower.send(committed)
    append(run, number, 4, 5)
    for follower in followers:
        follower.send(5)
        follower.close(clean=True)
    assert trackers[True].steps == [0, 1, 2, 3, 4, 5]
    assert trackers[False].steps == [0, 1, 2, 3, 4]
    assert trackers[True].safe == [0, 2, None, 5]  # made durable with each new checkpoint


def test_lines_of_earlier_attempts_count_up_to_where_a_later_one_resumed(run: RunDirectory) -> None:
    """A tracker that is added to a run later gets all of its history."""
    attempt(run, 0, *range(6))
    attempt(run, 4, *range(4, 9))
    newest = attempt(run, 6, *range(6, 8))
    tracker = Memory()
    Follower(run, newest, run.path / "wandb", tracker, live=True).send(6)
    assert tracker.steps == list(range(8))


def test_a_line_that_is_being_written_is_read_once_it_is_complete(run: RunDirectory) -> None:
    """And the file may be replaced by a copy, as after a failed fsync."""
    found = Lines(run.metrics_file, counts({}), 0)
    assert list(found.below(9)) == []
    text = '{"step": 0, "attempt": 0, "loss": "NaN"}\n{"step": 1, "attempt": 0}\n'
    run.metrics_file.write_text(text[:-9])
    (line,) = found.below(9)
    assert line["loss"] != line["loss"]
    copy = run.metrics_file.with_name("copy")
    copy.write_text(text)
    copy.replace(run.metrics_file)
    assert [line["step"] for line in found.below(9)] == [1]


def test_a_long_file_is_read_in_blocks(run: RunDirectory) -> None:
    """Which end within lines."""
    number = attempt(run, 0, *range(100))
    found = Lines(run.metrics_file, counts({number: 0}), 7)
    found.block = 150
    assert [line["step"] for line in found.below(50)] == list(range(7, 50))
    assert [line["step"] for line in found.below(99)] == list(range(50, 99))


def test_a_superseded_attempt_sends_nothing_more(run: RunDirectory) -> None:
    """On a node that was cut off, while the run goes on elsewhere; nor does it record anything."""
    number = attempt(run, 0, 0, 1)
    tracker = Memory()
    follower = Follower(run, number, run.path / "wandb", tracker, live=False)
    follower.send(1)
    attempt(run, 1)
    with pytest.raises(Superseded):
        follower.send(2)
    with pytest.raises(Superseded):
        follower.close(clean=True)
    assert tracker.steps == [0]
    assert read_sent(run.path / "wandb") == Sent(1)


def test_steps_that_a_later_attempt_repeated_are_lacking() -> None:
    """Even where the attempt that repeated them recorded nothing: a tracker may have failed in it."""
    recorded = Sent(step=150, attempt=3)
    assert recorded.lacks_from({2: 60, 3: 120}) == 150
    assert recorded.lacks_from({3: 120, 4: 100, 5: 200}) == 100


# --- TensorBoard


def test_tensorboard_reads_the_newest_attempt_last_whatever_the_clocks(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads files in the order of their names, which begin with a time. A torn record ends a killed writer's."""
    packages.require("tensorboard")
    from clusterddp.trackers.tensorboard import EventFile

    attempts = [(5000.0, 0, 0, 8, 0.5), (4000.0, 1, 5, 9, 0.25), (4500.0, 2, 7, 9, 0.125)]
    for clock, number, first, steps, loss in attempts:
        monkeypatch.setattr(time, "time", lambda clock=clock: clock)
        writer = EventFile(run.path / "tensorboard", Sent(first, number))
        for step in range(first, steps):
            writer.add(step, 100.0, {"loss": loss})
        assert writer.flush(None) == Sent(first, number)
        assert writer.close(steps, clean=True) == Sent(steps, number)
    with open(next((run.path / "tensorboard").glob("*attempt-0")), "ab") as file:
        file.write(b"\x18\0\0")
    expected = [(step, 0.5 if step < 5 else 0.25 if step < 7 else 0.125) for step in range(9)]
    assert tracker_files.scalars(run, "loss") == expected


# --- W&B


#: Writes four steps to W&B, offline, and is killed then, or when it has closed the folder, or ends.
WANDB = """
import os, sys
from pathlib import Path
from clusterddp.trackers import delivery
from clusterddp.trackers.wandb import TRACKER

folder, until = Path(sys.argv[1]), sys.argv[2]
writer = TRACKER.open(folder, delivery.read_sent(folder) or delivery.Sent(), {"mode": "offline", "project": "tests"})
for step in range(writer.first, 4):
    writer.add(step, 100.0, {"loss": 0.5})
assert not TRACKER.live, "W&B cannot take back a step"
assert writer.flush(4).step == writer.first, "what is not closed is not safe"
if until == "closed":
    writer._move_out = lambda _: os.kill(os.getpid(), 9)
if until != "written":
    writer.close(4, clean=True)
os.kill(os.getpid(), 9)
"""


def written_to_wandb(run: RunDirectory, until: str) -> list[list[int]]:
    """The steps in each folder that is complete."""
    done = subprocess.run([sys.executable, "-c", WANDB, str(run.path / "wandb"), until])
    assert done.returncode == -9
    return [[row["_step"] for row in rows] for _, rows in tracker_files.in_wandb(run)]


def test_a_wandb_folder_that_was_not_closed_is_written_again(run: RunDirectory) -> None:
    """W&B keeps up to 32 kB in memory: what a killed process has written is not known. It is never uploaded."""
    packages.require("wandb")
    assert written_to_wandb(run, "written") == []
    assert written_to_wandb(run, "moved") == [[0, 1, 2, 3]]


def test_a_wandb_folder_that_was_closed_is_not_written_again(run: RunDirectory) -> None:
    """Even if the process was killed before it could move it: the next one does."""
    packages.require("wandb")
    assert written_to_wandb(run, "closed") == []
    number = attempt(run, 0)
    assert read_sent(run.path / "wandb") == replace(
        read_sent(run.path / "wandb") or Sent(), step=4, attempt=number, mode="offline"
    )
    assert written_to_wandb(run, "written") == [[0, 1, 2, 3]]


# --- MLflow


def test_a_killed_process_leaves_no_step_twice_in_mlflow_and_no_second_run(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the server had the run, or the values, and before that was recorded here. MLflow's files, unlike its
    databases, keep the same value twice."""
    packages.require("mlflow")
    from mlflow import MlflowClient

    from clusterddp.trackers import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    options = {"tracking_uri": str(run.path / "store"), "experiment": "tests", "name": "a run", "config": {"lr": 0.1}}
    (run.path / "mlflow").mkdir()
    recorded: list[Sent] = []
    monkeypatch.setattr(mlflow, "write_sent", lambda _, sent: recorded.append(sent))
    killed = mlflow.MlflowRun(run.path / "mlflow", Sent(), options)
    assert [sent.id for sent in recorded] == [recorded[0].id, killed.run_id]
    for before, begin, end in ((recorded[0], 0, 5), (recorded[1], 0, 7), (replace(recorded[1], step=7), 5, 9)):
        writer = mlflow.MlflowRun(run.path / "mlflow", replace(before, attempt=1), options)
        writer.most_metrics = 3
        assert (writer.run_id, writer.first) == (killed.run_id, before.step)
        for step in range(begin, end):
            writer.add(step, 100.0, {"loss": step / 2, "acc@1": float("nan")})
        assert writer.flush(end).step == end
    writer.close(end, clean=False)
    client = MlflowClient(options["tracking_uri"])
    (found,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert (found.info.status, found.info.run_name, found.data.params) == ("FAILED", "a run", {"lr": "0.1"})
    for name in ("loss", "acc_1"):
        assert [metric.step for metric in client.get_metric_history(killed.run_id, name)] == list(range(9))


# --- rank 0's side


def told(run: RunDirectory, job: Job, seconds: float = 60.0) -> list[Any]:
    """The events of an attempt with the job's trackers that ends at once."""
    events: list[Any] = []
    number = attempt(run, 0, 0, 1)
    tracking = Tracking(run, job, number, events.append)
    tracking.begin(0)
    tracking.committed(2)
    tracking.end(clean=True, complete=False)
    tracking.close(seconds)
    return events


def test_a_tracker_that_fails_is_reported_once_and_stops_nothing(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as W&B without a key. What it lacks is in `status`, and the next attempt sends it."""
    packages.require("wandb")
    monkeypatch.setenv("HOME", str(run.path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    write_sent(run.path / "wandb", Sent(1))
    (event,) = told(run, Job("digits", trackers={"wandb": Wandb()}))
    assert (event.name, event.tracker) == ("tracker", "W&B")
    assert event.problem.startswith("gets no more values in this attempt: No API key configured")
    ((name, words),) = overview(run)
    assert name == "wandb" and "It lacks steps from 1 on: No API key configured" in words


@pytest.fixture
def _hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Python that starts now hangs."""
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("_hanging")
def test_a_tracker_that_hangs_is_killed_in_time(run: RunDirectory) -> None:
    """A run waits for its trackers for a bounded time, and a full pipe delays nothing."""
    assert told(run, Job("digits", trackers={"tensorboard": True}), seconds=0.1) == []
    assert not any("clusterddp.trackers.follower" in command for command in descendants(os.getpid()).values())


@pytest.mark.usefixtures("_hanging")
def test_a_tracker_of_a_complete_run_that_needs_longer_is_in_the_history(run: RunDirectory) -> None:
    """With the command that sends the rest, as no attempt follows."""
    events: list[Any] = []
    rank0 = Tracking(run, Job("digits", trackers={"tensorboard": True}), attempt(run, 0), events.append)
    rank0.begin(0)
    rank0.close(0.0, complete=True)
    then = f"did not receive all values in time. To send the rest, run `python -m clusterddp.trackers {run}`"
    assert events == [Tracker(tracker="TensorBoard", problem=then)]


def test_the_trackers_of_a_run_that_is_over_get_what_they_lack(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of it, up to its last checkpoint, and once."""
    packages.require("tensorboard")
    attempt(run, 0, 0, 1, 2)
    run.job_file.write_text(Job("digits", module="net", device="cpu", trackers={"tensorboard": True}).to_yaml())
    with raises(RunDirectoryError):
        send_rest(str(run))
    happened(run, {"time": 1.0, "attempt": 0, "event": "checkpoint", "step": 3})
    write_json(run.outcome_file, {"state": "completed", "step": 3, "attempts": 1, "reason": ""})
    for _ in range(2):
        assert send_rest(str(run)) == 0
        assert tracker_files.scalars(run, "loss") == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert len(list((run.path / "tensorboard").glob("events.*"))) == 1
    assert capsys.readouterr().err == 2 * "clusterddp: TensorBoard has all steps below 3\n"


@pytest.mark.parametrize("steps", [(), (0,)], ids=["no checkpoint", "stopped before the first step"])
def test_a_run_without_a_saved_step_has_no_values_for_its_trackers(
    run: RunDirectory, steps: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """The command says why, and starts no tracker."""
    packages.require("tensorboard")
    attempt(run, 0, 0)
    run.job_file.write_text(Job("digits", module="net", device="cpu", trackers={"tensorboard": True}).to_yaml())
    for step in steps:
        happened(run, {"time": 1.0, "attempt": 0, "event": "checkpoint", "step": step})
    write_json(run.outcome_file, {"state": "failed", "step": 0, "attempts": 1, "reason": ""})
    assert send_rest(str(run)) == 0
    expected = f"sent no values, because only steps below a checkpoint are sent and {run} has no such step\n"
    assert capsys.readouterr().err == f"clusterddp: {expected}"
    assert not list((run.path / "tensorboard").iterdir())


def test_a_script_without_run_directory_has_no_trackers() -> None:
    """Nor has a rank other than 0."""
    none = Tracking(None, Job("digits", trackers={"tensorboard": True}), 0, lambda *_, **__: None)
    none.begin(0)
    none.committed(3)
    none.end(clean=True, complete=False)
    none.close(0.0)


def test_wandb_and_mlflow_runs_have_the_scripts_options_without_secrets() -> None:
    """As their tables of runs show them."""
    words = "data --lr 1e-3 --amp -v --offset -0.5 --epochs=3 --name".split()
    args = (*words, "a b", "--api-key", "s3cr3tvalue")
    job = Job("digits", args=args, nodes=2, gpus_per_node=4, seed=7, trackers={"wandb": Wandb(group="g")})
    shown = {"seed": 7, "world_size": 8, "lr": 1e-3, "amp": True, "offset": -0.5, "epochs": 3, "name": "a b"}
    shown["api-key"] = "***"
    assert config(replace(job, args=args[:-2])) == {key: value for key, value in shown.items() if key != "api-key"}
    options = {"project": "digits", "group": "g", "name": "digits-3", "config": shown}
    assert wanted(job, "digits-3", {}) == {"wandb": options}
    assert wanted(job, "digits-3", {"WANDB_MODE": "disabled"}) == {}
    mlflow = replace(job, trackers={"mlflow": Mlflow(tracking_uri="http://mlflow:5000")})
    options = {"experiment": "digits", "tracking_uri": "http://mlflow:5000", "name": "digits-3", "config": shown}
    assert wanted(mlflow, "digits-3", {}) == {"mlflow": options}


def test_a_missing_package_is_named_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of that name in the current folder, where wandb writes its files, is no package."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for package in ("tensorboard", "wandb"):
        monkeypatch.delitem(sys.modules, package, raising=False)
    (tmp_path / "wandb").mkdir()
    check_packages(Job("digits"))
    with pytest.raises(UsageError) as caught:
        check_packages(Job("digits", trackers={"wandb": Wandb()}))
    assert str(caught.value) == (
        "wandb: the package 'wandb' is not installed. Run `pip install wandb`, or set wandb=false"
    )
    with raises(UsageError):
        check_packages(Job("digits", trackers={"tensorboard": True, "wandb": Wandb()}))


def test_status_shows_no_tracker_without_one(run: RunDirectory) -> None:
    """Nor one whose record another program has changed."""
    assert overview(run) == []
    (run.path / "wandb" / "sent.json").write_text("[]")
    assert overview(run) == []
    write_sent(run.path / "tensorboard", Sent(3))
    assert overview(run) == [("tensorboard", f"view it with: tensorboard --logdir {run.path}/tensorboard")]
    assert delivery.read_sent(run.path / "tensorboard") == Sent(3)
