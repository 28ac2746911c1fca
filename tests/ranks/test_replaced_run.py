"""Another member of the group, who may rename what is in the folder of runs, replaces a run's folder by links."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp.rundir.json_lines import read_lines
from clusterddp.rundir.run_directory import RunDirectory
from tests.other_user import MEMBER, UID, run_as_other, start_as_other
from tests.runs_on_disk import outcome_of
from tests.waiting import wait_until

TRAIN = """
import sys, time
from pathlib import Path
import torch
import clusterddp

ctx = clusterddp.init()
model = ctx.wrap(torch.nn.Linear(2, 1))
run = ctx.run(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
for _ in run.steps(12):
    model(torch.ones(2)).sum().backward()
    run.log(loss=1.0)
    while run.step == 5 and not Path(sys.argv[1], "go").exists():
        time.sleep(0.05)
    if run.step == 8 and sys.argv[2] == "fail" and not Path(sys.argv[1], "failed").exists():
        Path(sys.argv[1], "failed").touch()
        raise ConnectionError("once")
"""
#: Replaces RUN by a folder of the member's own with links to the victim's files: RUN PRECIOUS.
REPLACE = """
import os, sys
run, precious = sys.argv[1:]
os.rename(run, run + "-old")
os.mkdir(run)
os.chmod(run, 0o777)
for name in ("checkpoints", "logs", "private", "tensorboard"):
    os.symlink(precious, f"{run}/{name}")
for name in ("metrics.jsonl", "events.jsonl", "timing.jsonl", "outcome.json", "cancelled", "job.yaml"):
    os.symlink(f"{precious}/notes", f"{run}/{name}")
"""


@pytest.fixture
def group_folder(open_folder: Path) -> Iterator[Path]:
    """A folder whose group may write, and rename, what is in it. The group has two members."""
    folder = open_folder / "group"
    folder.mkdir()
    os.chown(folder, 0, UID)
    folder.chmod(0o2770)
    yield folder


def contents(folder: Path) -> dict[str, object]:
    return {path.name: (path.read_bytes(), path.stat().st_mode) for path in folder.iterdir()}


@pytest.mark.product  # the tests below have folders in the place of a run
@pytest.mark.parametrize("then", ["train", "fail"])
def test_a_run_whose_folder_is_replaced_writes_and_deletes_nothing_in_the_new_one(
    group_folder: Path, open_folder: Path, then: str
) -> None:
    """It continues in its own folder. A restart of its ranks refuses the other one."""
    run, precious = RunDirectory(group_folder / "run"), open_folder / "precious"
    precious.mkdir()
    (precious / "notes").write_text("mine\n")
    for step in (2, 4, 6, 8, 10, 12):
        for attempt in (0, 1):
            (precious / f"step-{step:012d}.attempt-{attempt}.safetensors").write_bytes(b"mine")
    for path in (precious, *precious.iterdir()):
        os.chown(path, UID, UID)
    before = contents(precious)
    (open_folder / "train.py").write_text(TRAIN)
    marks = open_folder / "marks"
    marks.mkdir()
    marks.chmod(0o777)
    options = ["--local", "--device", "cpu", "--run-dir", run.path, "--set", "checkpoint.every=2 steps"]
    options += ["--set", "checkpoint.keep=1", "--set", "share=group"]
    with start_as_other(
        sys.executable, "-m", "clusterddp", "submit", open_folder / "train.py", *options, "--", marks, then
    ) as loop:
        wait_until(lambda: list(read_lines(run.metrics_file))[4:], "the fifth step", 60)
        replaced = start_as_other(sys.executable, "-c", REPLACE, run.path, precious, user=MEMBER)
        assert (replaced.communicate()[1], replaced.returncode) == ("", 0)
        (marks / "go").touch()
        _, err = loop.communicate(timeout=120)
    assert contents(precious) == before, err
    assert run.path.stat().st_uid == MEMBER
    old = RunDirectory(f"{run.path}-old")
    steps = {line["step"] for line in read_lines(old.metrics_file)}
    if then == "train":
        assert (loop.returncode, steps) == (0, set(range(12))), err
        assert json.loads(old.outcome_file.read_text())["state"] == "completed"
    else:
        assert (loop.returncode != 0, max(steps)) == (True, 7), err
        assert "belongs to user" in "".join(path.read_text() for path in old.logs.rglob("rank-0.err")), err


@pytest.mark.parametrize("words", [["submit", "--local", "--run-dir"], ["cancel"], ["prune", "--yes"]])
def test_a_command_refuses_a_folder_that_was_put_in_the_place_of_a_run(
    group_folder: Path, open_folder: Path, words: list[str]
) -> None:
    """Also if all that it leads to belongs to the user."""
    run, precious = RunDirectory(group_folder / "run"), open_folder / "precious"
    assert run_as_other("mkdir", "-m", "750", run.path, precious).returncode == 0
    (precious / "notes").write_text('{"state": "failed", "step": 1, "attempts": 1, "reason": "x"}\n')
    os.chown(precious / "notes", UID, UID)
    before = contents(precious)
    assert start_as_other(sys.executable, "-c", REPLACE, run.path, precious, user=MEMBER).wait() == 0
    if words == ["cancel"]:  # a run that is over is not cancelled
        (run.path / "outcome.json").unlink()
    done = run_as_other(sys.executable, "-m", "clusterddp", *words, run.path)
    assert (done.returncode != 0, "Traceback" in done.stderr) == (True, False), done.stderr
    assert contents(precious) == before, done.stderr


@pytest.mark.product  # test_lost_parts.py resumes a copy in another folder
def test_a_run_that_its_owner_renames_between_two_jobs_continues(group_folder: Path, open_folder: Path) -> None:
    """Under its new name, from its checkpoint."""
    run, moved = RunDirectory(group_folder / "run"), RunDirectory(group_folder / "moved")
    (open_folder / "train.py").write_text(TRAIN)
    submit = [sys.executable, "-m", "clusterddp", "submit"]
    options = ["--local", "--device", "cpu", "--run-dir", run.path]
    with start_as_other(*submit, open_folder / "train.py", *options, "--", open_folder, "train") as loop:
        wait_until(lambda: list(read_lines(run.metrics_file))[4:], "the fifth step", 60)
        loop.send_signal(signal.SIGINT)
        (open_folder / "go").touch()
        _, err = loop.communicate(timeout=120)
    assert loop.returncode == 130, err
    assert run_as_other("mv", run.path, moved.path).returncode == 0
    done = run_as_other(*submit, "--local", "--run-dir", moved.path)
    assert (done.returncode, (outcome_of(moved) or {}).get("state")) == (0, "completed"), done.stderr
    assert "resumed" in [event["event"] for event in moved.events()]
