"""What shows only where copies are late, as they are on a GPU: the bits, the waits of the host, and the contexts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterddp.distributed.devices import MOST_AHEAD
from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp
from tests.preempted import logged
from tests.trainings import events_of
from tests.waiting import differing, final_state, story

SCRIPT = Path(__file__).with_name("scripts") / "lagging.py"
STEPS = 14


def test_late_copies_change_no_bit_and_no_step_waits_for_a_device(tmp_path: Path) -> None:
    """Preempted and killed, on two devices; equal to the undisturbed run on the CPU."""
    run, whole, counts = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "whole"), tmp_path / "counts"
    out = tmp_path / "out"
    ddp.run(SCRIPT, whole.path, STEPS, ranks=2, folder=out)
    late = {"STANDIN_CUDA_DELAY_MS": "20", "STANDIN_CUDA_SEED": "7", "STANDIN_CUDA_COUNTS": str(counts)}
    for codes in ((75,), (-9, 1, 75), (0,)):
        ddp.start(SCRIPT, run.path, STEPS, ranks=2, folder=out, devices=2, **late).expect(*codes)
    stopped, killed = events_of(run, "resumed")
    assert stopped["step"] in (4, 5) and killed["step"] in (6, 8), story(run)
    assert stopped["inexact"] == killed["inexact"] == []
    assert logged(run) == logged(whole)
    assert differing(final_state(run), final_state(whole)) == []

    files = sorted(counts.iterdir())
    assert files
    for file in files:
        found = json.loads(file.read_text())
        rank = file.name.split(".")[0].removeprefix("rank-")
        assert found["races"] == []
        assert set(found["contexts"]) == {rank}, found["contexts"]
        in_steps = [wait for wait in found["traced"] if any(map(in_step, wait["stack"]))]
        # When DDP makes its final buckets, in the first step.
        assert {wait["stack"][0].rpartition(" ")[2] for wait in in_steps} <= {"_pre_forward"}


def in_step(frame: str) -> bool:
    """Whether a frame is of the function ``step`` of the script, or takes logged values that have arrived."""
    place, _, function = frame.rpartition(" ")
    return function == "take_arrived" or (function == "step" and SCRIPT.name in place)


@pytest.mark.parametrize("stream", ["default", "own"])
def test_the_host_is_no_more_than_two_steps_ahead_of_its_device(tmp_path: Path, stream: str) -> None:
    """So that a stop finds little work queued before the copies of the state, also on a stream of the script's own."""
    script = SCRIPT.with_name("ahead.py")
    said = ddp.run(script, tmp_path / "run", stream, ranks=1, folder=tmp_path / "out", devices=1).output(0)
    assert f"ahead {MOST_AHEAD}" in said
