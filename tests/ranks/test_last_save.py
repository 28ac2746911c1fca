"""A disk that does not take the last checkpoint: the ranks keep the state in memory, and retry."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import pytest

from clusterddp.rundir.json_lines import read_lines
from clusterddp.rundir.run_directory import RunDirectory
from tests.ranks.test_local import start, submit
from tests.runs_on_disk import outcome_of
from tests.waiting import story, wait_until

#: In its last step, the checkpoint writer's files become limited to 4 KiB.
TRAIN = """
import os, resource, sys
from pathlib import Path
import torch
import clusterddp
from clusterddp.training import saving
from tests.descent import Descent
from tests.waiting import wait_until

saving.FIRST_PAUSE_S, saving.RETRIED_S = 0.1, float(sys.argv[1])
ctx = clusterddp.init(device="cpu")
model = torch.nn.Linear(4, 4096)
run = ctx.run(model=model, optimizer=Descent(model))
for _ in run.steps(5):
    model(torch.ones(4)).square().mean().backward()
    run.log(loss=float(run.step))
    if run.step < 4 or ctx.rank > 0:
        continue

    def writers():
        children = [child for task in Path("/proc/self/task").glob("*/children") for child in task.read_text().split()]
        return [pid for pid in children if b"checkpoint.writer" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    (writer,) = wait_until(writers, "the writer", 30)
    resource.prlimit(int(writer), resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    Path(sys.argv[2]).write_text(writer)
"""


def saved(run: RunDirectory) -> list[int]:
    return [int(path.name[5:17]) for path in run.checkpoints.iterdir()]


def test_a_last_checkpoint_that_finds_no_space_is_saved_once_there_is_some(tmp_path: Path) -> None:
    """Until then the run is not completed, and it can be stopped and continued."""
    script, run, writer = tmp_path / "train.py", RunDirectory(tmp_path / "run"), tmp_path / "writer"
    script.write_text(TRAIN)

    def waits(attempt: int) -> bool:
        return any((event["event"], event["attempt"]) == ("last_save_retried", attempt) for event in run.events())

    options = ["--device", "cpu", "--gpus", "2", "--set", "checkpoint.every=never", "--", "600", str(writer)]
    process = start(run, str(script), *options)
    wait_until(lambda: waits(0), "the wait for space", 60)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130, story(run)
    assert (saved(run), outcome_of(run)) == ([], None), story(run)
    process = start(run)
    wait_until(lambda: waits(1), "the wait for space", 60)
    assert run.outcome() is None
    resource.prlimit(int(writer.read_text()), resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    assert process.wait(60) == 0, story(run)
    outcome = outcome_of(run) or {}
    assert (saved(run), outcome["state"], outcome["attempts"]) == ([5], "completed", 2), story(run)
    assert {line["step"] for line in read_lines(run.metrics_file)} == set(range(5))


@pytest.mark.product  # the test above has the retries
def test_a_run_whose_last_checkpoint_finds_no_space_in_time_fails_without_a_restart(tmp_path: Path) -> None:
    """A restart would repeat steps, and find the same disk."""
    script, run = tmp_path / "train.py", RunDirectory(tmp_path / "run")
    script.write_text(TRAIN)
    options = [
        "--device",
        "cpu",
        "--gpus",
        "2",
        "--set",
        "checkpoint.every=never",
        "--",
        "0.5",
        str(tmp_path / "writer"),
    ]
    assert submit(run, str(script), *options).returncode == 1, story(run)
    outcome = outcome_of(run) or {}
    assert (saved(run), outcome["state"], run.attempts()) == ([], "failed", [0]), story(run)
    failed = [event for event in run.events() if event["event"] == "checkpoint_failed"]
    assert len(failed) > 1 and "File too large" in outcome["reason"], story(run)
