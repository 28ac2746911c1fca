"""Every recipe trains, is preempted and resumed, and ends as the undisturbed run, to the last bit."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp
from tests.trainings import events_of
from tests.waiting import differing, final_state, story

RECIPES = ddp.REPOSITORY / "docs" / "recipes"
HARNESS = Path(__file__).parents[1] / "scripts" / "recipe.py"
STOP = 20

#: Steps of a test, and what rank 0 prints at the end.
STEPS = {
    "early_stopping": (2000, r"ended after (\d+) of 2000 steps, best held-out loss \d+\.\d+"),
    "gan": (60, r"the generated points are at \d\.\d+ from the center on average"),
    "pool": (40, "done after 40 steps"),
    "reinforcement_learning": (40, r"\d\.\d+% of the pushes let a pole fall"),
    "stream": (40, r"rank 0 is at byte \d+ of .*\.py"),
    "sync_batchnorm": (40, r"SyncBatchNorm needs GPUs.*\nrunning mean of channel 0: \S+"),
    "weighted_sampling": (40, r"\d\d% of the rare samples are recognized"),
}


def test_every_recipe_is_tested_and_on_the_page() -> None:
    scripts = {path.stem for path in RECIPES.glob("*.py")}
    assert scripts == {*STEPS, "mixed_precision"}
    assert set(re.findall(r"\((\w+)\.py\)", (RECIPES / "README.md").read_text())) == scripts


@pytest.mark.parametrize("recipe", STEPS)
def test_a_recipe_that_was_preempted_ends_as_the_undisturbed_run(tmp_path: Path, recipe: str) -> None:
    """Started a last time with all steps done, it still does what follows the loop."""
    steps, printed = STEPS[recipe]

    def start(run: RunDirectory, stop: int) -> ddp.Ranks:
        script = [RECIPES / f"{recipe}.py", "--steps", steps]
        return ddp.start(HARNESS, run.path, stop, *script, ranks=2, folder=tmp_path / "out")

    whole, preempted = RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "preempted")
    assert re.search(printed, start(whole, -1).expect(0).output(0))
    start(preempted, STOP).expect(75)
    start(preempted, STOP).expect(0)
    check_same(preempted, whole)
    assert re.search(printed, start(preempted, STOP).expect(0).output(0))


def check_same(preempted: RunDirectory, whole: RunDirectory) -> None:
    """The preempted run says that its resume is exact, and it is: logged values, and the final state of all parts."""
    assert [event["inexact"] for event in events_of(preempted, "resumed")] == [[]], story(preempted)
    assert logged(preempted) == logged(whole)
    assert differing(final_state(preempted), final_state(whole)) == []
    assert not events_of(whole, "diverged"), story(whole)


def logged(run: RunDirectory) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name not in ("time", "attempt")} for line in run.metrics()]


def submit(run: RunDirectory, script: Path | None = None, *options: str, code: int = 0) -> str:
    """``clusterddp submit --local`` with two ranks, or of the run again; what it says."""
    shape = [str(script), "--device", "cpu", "--gpus", "2"] if script else []
    line = [sys.executable, "-m", "clusterddp", "submit", *shape, "--local", "--run-dir", str(run), *options]
    done = subprocess.run(line, capture_output=True, text=True, timeout=200)
    assert done.returncode == code, done.stderr
    return done.stderr


@pytest.mark.product  # test_exact_resume.py has float16 and pieces in other loops
def test_mixed_precision_accumulates_over_pieces_and_resumes_with_the_scale(tmp_path: Path) -> None:
    """The global batch of the job definition: two pieces per rank and step. Only the preempted run has a supervisor."""
    whole, preempted = RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "preempted")
    script, steps = RECIPES / "mixed_precision.py", ["--steps", "60"]
    stop = ["--set", "global_batch=64", "--", "", str(STOP), str(script), *steps]
    assert f"at step {STOP + 1}, checkpoint {STOP + 1} committed" in submit(preempted, HARNESS, *stop, code=130)
    assert "32 samples per rank and step, at most 16 at a time" in submit(preempted)
    assert preempted.attempts() == [0, 1], story(preempted)
    whole.create()
    whole.create_attempt()
    shutil.copy(preempted.job_file, whole.job_file)
    ranks = {"CLUSTERDDP_RUN_DIR": str(whole.path), "CLUSTERDDP_ATTEMPT": "0", "CLUSTERDDP_DEVICE": "cpu"}
    ddp.run(script, *steps, ranks=2, folder=tmp_path / "out", **ranks)
    check_same(preempted, whole)
    assert {line["scale"] for line in whole.metrics()} - {2.0**16}, "no step was skipped: the scale was never changed"


def test_early_stopping_ends_at_the_best_loss_and_some_evaluations(tmp_path: Path) -> None:
    """Evaluations are 10 steps apart, and the fourth without an improvement is the end."""
    run = RunDirectory(tmp_path / "run")
    script = [RECIPES / "early_stopping.py", "--steps", 2000]
    ddp.run(HARNESS, run.path, -1, *script, ranks=2, folder=tmp_path / "out")
    losses = {line["step"]: line["held_out_loss"] for line in run.metrics() if "held_out_loss" in line}
    best = min(losses, key=losses.__getitem__)
    assert (run.metrics() or [])[-1]["step"] == max(losses) == best + 40


def test_weighted_sampling_draws_both_classes_equally_often(tmp_path: Path) -> None:
    """From data with one sample in 20 of the rare class: the mean over 60 batches of 32."""
    run = RunDirectory(tmp_path / "run")
    script = [RECIPES / "weighted_sampling.py", "--steps", 60, "--workers", 0]
    ddp.run(HARNESS, run.path, -1, *script, ranks=2, folder=tmp_path / "out")
    shares = [line["rare"] for line in run.metrics()]
    assert 0.45 < sum(shares) / len(shares) < 0.55


@pytest.mark.product
@pytest.mark.parametrize("recipe", STEPS)
def test_a_recipe_preempted_by_submit_ends_as_the_undisturbed_run(tmp_path: Path, recipe: str) -> None:
    """With more steps, since the preemption takes some; and patience, so that there are as many of early stopping."""
    whole, preempted = RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "preempted")
    options = ["--", "--steps", "1000", *(["--patience", "100"] if recipe == "early_stopping" else [])]
    script = RECIPES / f"{recipe}.py"
    submit(whole, script, *options)
    submit(preempted, script, "--preempt-after", str(STOP), *options)
    assert preempted.attempts() == [0, 1], story(preempted)
    check_same(preempted, whole)
