"""Other people's loops: a real preemption, and the run goes on at the step where it stopped."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

import clusterddp
from clusterddp.rundir import RunDirectory
from tests.waiting import preempt_local, story, wait_until

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.mark.parametrize("package", ["transformers", "lightning", "accelerate"])
def test_a_preempted_run_goes_on_at_the_step_where_it_stopped(tmp_path: Path, package: str) -> None:
    """All ranks stop after the same step, the framework saves, the next attempt makes the next step."""
    if importlib.util.find_spec(package) is None:
        (pytest.fail if "CI" in os.environ else pytest.skip)(f"{package} is not installed: make .venv/integrations")
    out, marks = tmp_path / "out", tmp_path / "marks"
    marks.mkdir()
    handle = clusterddp.launch(
        SCRIPTS / f"with_{package}.py", out, marks, gpus_per_node=2, device="cpu", local=True, run_dir=tmp_path / "run"
    )
    run = RunDirectory(handle.path)
    wait_until(lambda: len(list(marks.iterdir())) == 2 or run.outcome(), "both ranks at step 3", timeout=120)
    assert run.outcome() is None, story(run)
    preempt_local(run)
    assert handle.wait(timeout=120) == "completed", story(run)
    for rank in range(2):
        made = [[int(line.split()[-1]) for line in handle.logs(rank, attempt).splitlines() if line.startswith("made")]
                for attempt in (0, 1)]  # fmt: skip
        assert 3 <= len(made[0]) < 60, story(run)
        assert made[0] + made[1] == list(range(1, 61)), story(run)
    assert run.attempts() == [0, 1]
