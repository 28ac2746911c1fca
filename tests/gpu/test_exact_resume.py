"""Runs on stand-in devices that are stopped, and end with the bits of the same runs left alone."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp
from tests.gpu.conftest import GPUs
from tests.preempted import attempt, check_same, logged, train_twice
from tests.preempting import preempting
from tests.ranks.test_local import ranks_of, start, variable
from tests.trainings import events_of
from tests.waiting import differing, final_state, story, wait_for_step

DIGITS = ddp.REPOSITORY / "jobs" / "digits.py"
STEPS = 150


@pytest.mark.product  # slurm/test_gpus.py has the preemption on a real Slurm, test_device_faults.py the restart
def test_digits_on_two_nodes_of_two_devices_preempted_and_killed_ends_with_the_same_bits(
    gpus: GPUs, tmp_path: Path
) -> None:
    """One rank is killed in the second attempt; the third one starts at the newest checkpoint."""
    gpus(4)
    run, whole = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "whole")
    shape = ["jobs/digits.yaml", "--device", "cuda", "--nodes", "2", "--gpus", "2"]
    with preempting(30):
        submitted = start(run, *shape, "--set", "checkpoint.every=25 steps", "--", "--steps", str(STEPS))
    wait_for_step(run, 60)
    devices = {variable(pid, "RANK"): (variable(pid, "CUDA_VISIBLE_DEVICES"), pid) for pid in ranks_of(run)}
    assert [devices[rank][0] for rank in "0123"] == ["0,1", "0,1", "2,3", "2,3"]
    os.kill(devices["3"][1], signal.SIGKILL)
    _, err = submitted.communicate(timeout=120)
    assert submitted.returncode == 0, err + story(run)
    preempted, killed = events_of(run, "resumed")
    assert 30 <= preempted["step"] <= 60 and killed["step"] >= 50 and preempted["inexact"] == killed["inexact"] == []

    attempt(whole, [DIGITS, "--steps", STEPS], ranks=4, devices=4).expect(0)
    assert logged(run) == logged(whole)
    assert differing(final_state(run), final_state(whole)) == []


def test_every_kind_of_wrapped_model_on_devices_is_resumed_exactly(tmp_path: Path) -> None:
    """A dozen models in one run of three ranks. One is reported as inexact, and shows that the others could differ."""
    script = [Path(__file__).with_name("scripts") / "variants.py", 7]
    preempted, whole, _ = train_twice(tmp_path, script, [3], ranks=3, devices=6)
    (resumed,) = events_of(preempted, "resumed")
    assert resumed["inexact"] == [
        "models.unsettled is wrapped in DDP with static_graph=True, without all_used_once=True"
    ]
    different = differing(final_state(preempted), final_state(whole))
    assert different and {name.split(".")[2] for name in different} == {"unsettled"}
    lines, expected = ([line | {"unsettled": 0} for line in logged(run)] for run in (preempted, whole))
    assert lines == expected
    scales = [line["scale"] for line in expected]
    assert {0.5, 2.0} <= {later / former for former, later in itertools.pairwise(scales)}  # it has skipped steps


@pytest.mark.parametrize("own", [False, True])
def test_numbers_that_samples_and_steps_draw_on_a_second_device_are_the_same_after_a_resume(
    tmp_path: Path, own: bool
) -> None:
    """With ``ctx.loader``, and with a loader that a resume reads again from the start."""
    script = [Path(__file__).with_name("scripts") / "draws.py", 8]
    environment = {"OWN": "1"} if own else {}
    preempted, whole, _ = train_twice(tmp_path, script, [3], ranks=1, devices=2, **environment)
    assert logged(preempted) == logged(whole)
    assert differing(final_state(preempted), final_state(whole)) == []
    assert len({line["drawn"] for line in logged(whole)}) == 8


def test_a_stop_needs_no_memory_of_the_devices(tmp_path: Path) -> None:
    """What the ranks agree on, their own state, and gradients that wait, reach rank 0 through its host."""
    script = [Path(__file__).with_name("scripts") / "full_device.py", 8]
    preempted, whole, _ = train_twice(tmp_path, script, [1], devices=2)
    check_same(preempted, whole)
