"""A sharded run whose rank hangs or is killed restarts in place, from the newest complete checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests.cli import clusterddp
from tests.ranks.test_sharded_resume import SHARDED, events, losses, samples, state, train
from tests.runs_on_disk import outcome_of

pytestmark = pytest.mark.product


def check_restarts(folder: Path, *options: object, word: str, ranks: int = 2) -> None:
    """A run of 10 steps that saves every third one, and is disturbed in step 8, ends as one that is not."""
    run = RunDirectory(folder / "run")
    shape = ["--local", "--device", "cpu", "--gpus", ranks, "--run-dir", run]
    settings = ["--set", "watchdog.step_s=4", "--set", "checkpoint.every=3 steps"]
    clusterddp("submit", SHARDED, *shape, *settings, "--", run, 10, *options)
    assert (outcome_of(run) or {})["state"] == "completed"
    assert run.attempts() == [0, 1]
    assert len(events(run.path, word)) == 1
    (resumed,) = events(run.path, "resumed")
    assert resumed["step"] in (3, 6) and resumed["inexact"] == []
    whole = train(folder / "whole", 10, ranks=ranks)
    assert state(whole, "end") in (run.attempt_logs(1) / "rank-0.out").read_text()
    assert losses(run.path) == losses(folder / "whole")
    assert samples(run.path) == samples(folder / "whole")


def test_a_run_with_a_rank_that_hangs_restarts_in_place(tmp_path: Path) -> None:
    check_restarts(tmp_path, "--hang-in", 8, word="hung")


def test_a_run_with_a_rank_that_is_killed_restarts_in_place(tmp_path: Path) -> None:
    check_restarts(tmp_path, "--kill-in", 8, word="rank_failed", ranks=3)
