"""Training loops of other libraries: a real preemption, and the run resumes at the step where it stopped."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import clusterddp
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm.run_states import Cause
from clusterddp.supervisor.controller import give_notice
from tests.conftest import Launch
from tests.packages import require
from tests.runs_on_disk import outcome_of
from tests.trainings import events_of
from tests.waiting import preempt_local, story, wait_until

SCRIPTS = Path(__file__).parents[1] / "scripts"


# test_two_lines.py has the two lines that a loop with accelerate needs.
@pytest.mark.parametrize("package", ["transformers", pytest.param("accelerate", marks=pytest.mark.product)])
def test_a_preempted_run_resumes_at_the_step_where_it_stopped(launch: Launch, tmp_path: Path, package: str) -> None:
    """All ranks stop after the same step, the framework saves, the next attempt makes the next step."""
    require(package)
    handle = start_until_step_3(launch, tmp_path, package)
    preempt_local(RunDirectory(handle.path))
    let_go(handle, tmp_path)
    check_resumes(handle)


def test_a_preempted_lightning_run_resumes_though_only_one_rank_got_the_signal(launch: Launch, tmp_path: Path) -> None:
    """Lightning's own handler would wait there for a broadcast of rank 0."""
    require("lightning")
    handle = start_until_step_3(launch, tmp_path, "lightning")
    give_notice(RunDirectory(handle.path), Cause.PREEMPTED)
    os.kill(int((tmp_path / "marks" / "1").read_text()), signal.SIGTERM)
    let_go(handle, tmp_path)
    check_resumes(handle)


def test_lightning_resumes_from_the_checkpoint_with_the_highest_step(tmp_path: Path) -> None:
    """Of the callback or of ModelCheckpoint. A file name sorts as text, in which 900 comes after 1000."""
    require("lightning")
    from clusterddp.integrations.lightning import SaveAndRequeue

    stop = SaveAndRequeue(tmp_path)
    assert stop.newest_checkpoint is None
    for name in ("stop-step=900.ckpt", "last.ckpt", "stop-step=1000.ckpt", "epoch=2-step=1200.ckpt"):
        (tmp_path / name).touch()
        if "step" in name:
            assert stop.newest_checkpoint == str(tmp_path / name)


def start_until_step_3(launch: Launch, tmp_path: Path, package: str) -> clusterddp.Handle:
    """Both ranks have made the third of 60 steps, and wait."""
    out, marks = tmp_path / "out", tmp_path / "marks"
    marks.mkdir()
    (marks / "wait").touch()
    handle = launch(SCRIPTS / f"with_{package}.py", out, marks)
    run = RunDirectory(handle.path)
    wait_until(lambda: len(list(marks.glob("[01]"))) == 2 or outcome_of(run), "both ranks at step 3", timeout=120)
    assert run.outcome() is None, story(run)
    return handle


def let_go(handle: clusterddp.Handle, tmp_path: Path) -> None:
    """They continue once they are told to stop."""
    run = RunDirectory(handle.path)
    wait_until(lambda: events_of(run, "signal"), f"the ranks to be told\n{story(run)}")
    (tmp_path / "marks" / "wait").unlink()


def check_resumes(handle: clusterddp.Handle) -> None:
    """A second attempt completes the run; each rank has made each step once."""
    run = RunDirectory(handle.path)
    assert handle.wait(timeout=120) == "completed", story(run)
    for rank in range(2):
        made = [[int(line.split()[-1]) for line in handle.logs(rank, attempt).splitlines() if line.startswith("made")]
                for attempt in (0, 1)]  # fmt: skip
        assert 3 <= len(made[0]) < 60, story(run)
        assert made[0] + made[1] == list(range(1, 61)), story(run)
    assert run.attempts() == [0, 1]
