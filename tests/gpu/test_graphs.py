"""CUDA graphs of a whole step, whose replays call no hook of the optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp
from tests.preempted import logged
from tests.trainings import events_of
from tests.waiting import differing, final_state, story

SCRIPT = Path(__file__).with_name("scripts") / "whole_step.py"
STEPS = 6


@pytest.mark.parametrize(
    ("when", "where", "step"), [("before", "after", 4), ("within", "after", 4), ("within", "before", 3)]
)
def test_a_stop_beside_the_replay_of_an_optimizers_step_repeats_no_batch(
    tmp_path: Path, when: str, where: str, step: int
) -> None:
    """The graph is captured before the run or in a step, and the stop comes before or after the replay in step 3."""
    run, whole, out = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "whole"), tmp_path / "out"
    ddp.run(SCRIPT, whole, STEPS, when, "nowhere", ranks=1, folder=out, devices=1)
    ddp.start(SCRIPT, run, STEPS, when, where, ranks=1, folder=out, devices=1).expect(75)
    ddp.run(SCRIPT, run, STEPS, when, where, ranks=1, folder=out, devices=1)
    (resumed,) = events_of(run, "resumed")
    cut = [] if where == "before" else ["step 3 was stopped during an evaluation, and the rest of its code did not run"]
    assert (resumed["step"], resumed["inexact"]) == (step, cut), story(run)
    assert [line for line in logged(run) if line["step"] != 3] == [line for line in logged(whole) if line["step"] != 3]
    assert differing(final_state(run), final_state(whole)) == []
