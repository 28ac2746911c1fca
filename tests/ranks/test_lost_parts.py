"""A run that lost a part of its directory resumes from its newest checkpoint, or names what is missing; never from step
0 by itself."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from clusterddp.process import module_command
from clusterddp.rundir.run_directory import RunDirectory
from tests.waiting import story

SCRIPT = Path(__file__).parents[1] / "scripts" / "train.py"


def submit(run: RunDirectory, steps: int, *options: str) -> subprocess.CompletedProcess[str]:
    command = [*module_command("clusterddp"), "submit", "--run-dir", str(run), *options]
    options = ("--local", "--device", "cpu", "--set", "checkpoint.every=2 steps", "--", "--steps", str(steps))
    return subprocess.run([*command, *options], capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run of four steps."""
    run = RunDirectory(tmp_path_factory.mktemp("lost") / "run")
    done = submit(run, 4, str(SCRIPT))
    assert done.returncode == 0, done.stderr
    return run


def without(run: RunDirectory, into: Path, *names: str) -> RunDirectory:
    """A copy of a run that lacks these folders."""
    shutil.copytree(run.path, into, ignore=lambda folder, _: names if Path(folder) == run.path else ())
    return RunDirectory(into)


def test_a_copy_without_logs_and_records_resumes_from_the_newest_checkpoint(
    trained: RunDirectory, tmp_path: Path
) -> None:
    """By the history: no step is trained twice, and no attempt's number used again."""
    run = without(trained, tmp_path / "copy", "private", "logs")
    done = submit(run, 6, "--change")
    assert done.returncode == 0, done.stderr + story(run)
    assert [(line["step"], line["attempt"]) for line in run.metrics()] == [
        *((step, 0) for step in range(4)),
        (4, 1),
        (5, 1),
    ]
    assert "resumed from step 4" in done.stderr


def test_a_run_whose_checkpoints_are_missing_does_not_restart_from_step_0(
    trained: RunDirectory, tmp_path: Path
) -> None:
    """It says which is missing and what to do; nothing is written."""
    for missing in (("checkpoints",), ("checkpoints", "private", "logs")):
        run = without(trained, tmp_path / "-".join(missing), *missing)
        before = run.events()
        done = submit(run, 6, "--change")
        words = f"checkpoint 4 of this run was committed, but all checkpoints are missing from {run.checkpoints}"
        assert (done.returncode, words in done.stderr) == (1, True), done.stderr
        assert "Restore the files, or start a new run in a different folder" in done.stderr
        assert (run.events(), run.outcome()) == (before, trained.outcome())
