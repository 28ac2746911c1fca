"""``python -m benchmarks.gpu_check``: its cases work on a stand-in, and only a GPU's results count as measurements."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_check import __main__ as command_line
from benchmarks.gpu_check import session, training
from benchmarks.gpu_check.case import REPOSITORY, SMALL, Case, Lab, Result, carry_out
from clusterddp.jobdef.job import Keep
from tests.checkpoint_files import save
from tests.runs_on_disk import recorded_run, started


@pytest.mark.product  # make gpu-check-stand-in runs all cases
def test_the_first_cases_pass_on_a_stand_in(tmp_path: Path) -> None:
    """Their results are marked, and give no rows. Another call has what is left."""
    out = tmp_path / "out.json"
    asked = ["--stand-in", "--out", out, "--folder", tmp_path / "runs", "--only", "folder", "graph"]
    command = [sys.executable, "-m", "benchmarks.gpu_check", *map(str, asked)]

    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "graph: not run: on the stand-in, nothing disturbs a capture" in done.stdout
    found = json.loads(out.read_text())
    states = {name: result["state"] for name, result in found["cases"].items()}
    assert states == {"folder": "passed", "graph": "not run"}
    assert {(result["on"], result["counts"]) for result in found["cases"].values()} == {("stand-in", False)}
    assert "steps=100" in found["cases"]["folder"]["reduced"] and found["rows"] == []
    assert "| folder | passed (reduced: " in out.with_suffix(".md").read_text()
    options = command_line.parser().parse_args(["--only", "folder", "graph"])
    assert [case.name for case in session.left(options, found["cases"], 1)] == ["graph"]


#: One case that is endless, and one that is not begun.
ENDLESS = """
import json, subprocess, sys, time
from pathlib import Path
from benchmarks.gpu_check import session
from benchmarks.gpu_check.case import Case, Sizes, Speeds
from clusterddp.process import adopt_orphans

def act(lab):
    subprocess.run(["sh", "-c", "setsid sleep 1000 & echo $! > ../pid; echo began > run.log; wait"], cwd=lab.folder)

adopt_orphans()
facts, speeds = {"gpu": "NVIDIA H100"}, Speeds(0, 1, 1, 1)
made = session.Session(facts, speeds, Sizes(), 1, "inductor", Path(sys.argv[1]), time.monotonic() + 3)
found = [session.attempt(Case("endless", "", act, 0, work_s), made).as_json() for work_s in (1, 60)]
Path(sys.argv[1], "found.json").write_text(json.dumps(found))
"""


def test_a_case_is_killed_when_the_budget_is_over_with_all_it_has_started(tmp_path: Path) -> None:
    """Also a process with a session of its own, as a run's supervisor has. The case has no result then."""
    subprocess.run([sys.executable, "-c", ENDLESS, tmp_path], cwd=REPOSITORY, check=True)
    cut, left = json.loads((tmp_path / "found.json").read_text())
    assert cut["state"] == "not run" and "when the budget was over" in cut["words"] and "began" in cut["story"]
    assert left["state"] == "not run" and "it needs about 60 s" in left["words"]
    assert not cut["counts"] and cut["on"] == "NVIDIA H100"
    pid = int((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists()


# ---- without a process


def lab_of(path: Path, stand_in: bool = False) -> Lab:
    return Lab(SMALL, 1, stand_in, path, path, "inductor")


def test_a_checkpoint_that_is_not_the_state_of_its_step_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is copied too late."""
    weights = {step: torch.full((3,), float(step)) for step in (6, 12, 18)}
    lines = [{"step": step, "time": 1.0, "attempt": 0, "cycle_s": 0.1, "digest": 0} for step in range(18)]
    run = recorded_run(tmp_path / "run", [started(0)])
    for step, weight in weights.items():
        lines[step - 1]["digest"] = int(weight.view(torch.int32).sum(dtype=torch.int64))
        save(run, 0, step, {"model": {"w": weight, "running_mean": torch.ones(1)}}, keep=Keep(9))
    monkeypatch.setattr(Lab, "train", lambda *_, **__: run)

    def result() -> Result:
        run.metrics_file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return carry_out(Case("snapshot", "", training.snapshot), lab_of(tmp_path))

    assert result().state == "passed", result().words
    lines[11]["digest"] += 1
    assert (result().state, result().words) == ("failed", "checkpoint 12 is not the state after 12 steps")


@pytest.mark.product
def test_without_a_gpu_it_says_what_to_do() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--only", "wrap"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "(without one: --stand-in)" in done.stderr and "no GPU is visible" in done.stderr
