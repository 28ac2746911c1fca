"""A run that lost a part of its directory resumes from its newest checkpoint, or names what is missing; never from step
0 by itself."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from clusterddp.checkpoint.store import Checkpoints, lineage, of_run
from clusterddp.errors import CheckpointError
from clusterddp.jobdef.job import Keep
from clusterddp.process import module_command
from clusterddp.rundir.run_directory import RunDirectory
from tests.checkpoint_files import save
from tests.histories import happened
from tests.runs_on_disk import outcome_of
from tests.waiting import story
from tests.wording import raises, says

SCRIPT = Path(__file__).parents[1] / "scripts" / "train.py"
CONTENT = {"model": {"weight": torch.ones(2)}}


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
        words = f"checkpoint 4 of this run was saved, but all checkpoints are missing from {run.checkpoints}"
        assert (done.returncode, words in done.stderr) == (1, True), done.stderr
        says(done.stderr)
        assert (run.events(), outcome_of(run)) == (before, outcome_of(trained))


def two_attempts(path: Path) -> RunDirectory:
    """Attempt 1 continued from step 10 of attempt 0, which saved step 15 before it noticed."""
    run = RunDirectory(path)
    run.create()
    for number, parent in enumerate((None, (0, 10))):
        assert run.create_attempt() == number
        Checkpoints(run, number, Keep(9)).record_resume(parent)
        kind = {"event": "training"} if parent is None else {"event": "resumed", "parent": {"attempt": 0, "step": 10}}
        happened(run, {"time": 1.0, "attempt": number, "step": 10 * number, **kind})
        for step in ((10, 15), (20,))[number]:
            save(run, number, step, CONTENT, keep=Keep(9))
            happened(run, {"time": 1.0, "attempt": number, "event": "checkpoint", "step": step})
    return run


@pytest.mark.parametrize("missing", [(), ("private",), ("logs",), ("private", "logs")])
def test_the_lineage_is_the_same_without_the_records(tmp_path: Path, missing: tuple[str, ...]) -> None:
    """The history has their content: step 15 is not part of the lineage."""
    run = two_attempts(tmp_path / "run")
    for name in missing:
        shutil.rmtree(run.path / name)
    run.private.mkdir(exist_ok=True)
    assert run.create_attempt() == 2
    assert list(lineage(run, 2)) == [(1, float("inf")), (0, 10)]
    assert [(one.attempt, one.step) for one in of_run(run).candidates()] == [(1, 20), (0, 10)]


def test_without_records_and_history_the_last_attempts_files_count(tmp_path: Path) -> None:
    """Only their names are left."""
    run = two_attempts(tmp_path / "run")
    for folder in (run.private, run.logs):
        shutil.rmtree(folder)
    run.events_file.unlink()
    assert [(one.attempt, one.step) for one in Checkpoints(run, 9, Keep()).candidates()] == [(1, 20)]


def test_a_fork_without_its_checkpoint_is_an_error(tmp_path: Path) -> None:
    """It was never trained, and would begin at step 0."""
    run = RunDirectory(tmp_path / "run")
    run.create()
    Checkpoints(run, run.create_attempt(), Keep()).record_resume(None)
    of_run(run).check_present()
    happened(run, {"time": 1.0, "attempt": 0, "event": "forked", "step": 20})
    with raises(CheckpointError):
        of_run(run).check_present()
