"""A device that hangs, while all hosts wait in the same place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests.gpu.conftest import GPUs
from tests.trainings import events_of
from tests.waiting import story

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.product  # unit/test_hangs.py has what is concluded
def test_the_rank_whose_device_never_completes_a_kernel_is_named_although_all_hosts_are_in_their_backward(
    gpus: GPUs, tmp_path: Path
) -> None:
    """By the marks on its stream; where the main threads are would name rank 0. Nobody opens a context elsewhere."""
    gpus(2)
    run = RunDirectory(tmp_path / "run")
    command = [sys.executable, "-m", "clusterddp.submit", "tests/scripts/hanging.py", "--local", "--run-dir", str(run)]
    options = ["--device", "cuda", "--gpus", "2", "--set", "watchdog.step_s=4", "--set", "watchdog.on_hang=end"]
    ended = subprocess.run([*command, *options, "--", "kernel"], cwd=REPOSITORY, capture_output=True, text=True)
    assert ended.returncode == 1, ended.stderr + story(run)
    (hung,) = events_of(run, "hung")
    assert (hung["late"], hung["step"]) == ([1], 100), hung
    assert hung["suspect"] == hung["host"]
    assert "Its GPU is still working on step 101. The other ranks' GPUs wait in step 101" in hung["what"]
