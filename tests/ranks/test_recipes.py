"""Every recipe trains, is preempted and resumed, and ends as the undisturbed run, to the last bit."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp
from tests.cli import clusterddp
from tests.packages import require
from tests.preempted import HARNESS, attempt, check_same, train_twice
from tests.preempting import preempting
from tests.waiting import story

RECIPES = ddp.REPOSITORY / "docs" / "recipes"
STOP = 20

#: Steps of a test, what rank 0 prints at the end, and further arguments.
STEPS: dict[str, tuple[Any, ...]] = {
    "pool": (40, "done after 40 steps"),
    "reinforcement_learning": (40, r"\d\.\d+% of the pushes let a pole fall"),
    "sync_batchnorm": (40, r"SyncBatchNorm needs GPUs.*\nrunning mean of channel 0: \S+"),
    "stateful_dataloader": (40, r"4 files, [2-9] passes over them", "--files", "4"),
    "tar_archives": (40, "8 archives"),
    "tokens": (40, r"\d{5,} blocks in \d+ files"),
}
#: Others are a loop as in jobs/, or a loader as these.
TYPICAL = {"stateful_dataloader", "tokens"}
#: What some need, and what clusterddp says of their loaders.
PACKAGES = {"stateful_dataloader": ("torchdata",), "tar_archives": ("webdataset",)}
DOUBTS = {
    "stateful_dataloader": "the workers of StatefulDataLoader draw their own random numbers",
    "tar_archives": "DataLoader has no state, so a resume is exact only if it repeats its batches",
}


def test_every_recipe_is_tested_and_on_the_page() -> None:
    scripts = {path.stem for path in RECIPES.glob("*.py")}
    assert scripts == {*STEPS, "mixed_precision", "profiled"}
    assert set(re.findall(r"\((\w+)\.py\)", (RECIPES / "README.md").read_text())) == scripts


@pytest.mark.parametrize(
    "recipe", [pytest.param(recipe, marks=[] if recipe in TYPICAL else pytest.mark.product) for recipe in STEPS]
)
def test_a_recipe_that_was_preempted_ends_as_the_undisturbed_run(tmp_path: Path, recipe: str) -> None:
    """Started a last time with all steps done, it still does what follows the loop."""
    require(*PACKAGES.get(recipe, ()))
    steps, printed, *options = STEPS[recipe]
    script = [RECIPES / f"{recipe}.py", "--steps", steps, *options]
    preempted, whole, said = train_twice(tmp_path, script, [STOP])
    assert re.search(printed, said)
    check_same(preempted, whole, doubt=DOUBTS.get(recipe, ""))
    assert re.search(printed, attempt(preempted, script).expect(0).output(0))


def test_a_profile_has_its_steps_once_and_changes_no_result(tmp_path: Path) -> None:
    """The profiled run is preempted later, and compared with one whose profile would begin after its last step."""
    script = [RECIPES / "profiled.py", "--steps", 30, "--profile-steps", 3]
    preempted, whole = RunDirectory(tmp_path / "preempted"), RunDirectory(tmp_path / "whole")
    attempt(whole, [*script, "--profile-from", 99]).expect(0)
    attempt(preempted, script, [STOP]).expect(75)
    attempt(preempted, script).expect(0)
    check_same(preempted, whole)
    assert not (whole.path / "profiles").exists()
    [trace] = (preempted.path / "profiles").iterdir()
    names = [event["name"] for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]]
    assert {name for name in names if name.startswith("ProfilerStep#")} == {f"ProfilerStep#{s}" for s in (10, 11, 12)}


def submit(run: RunDirectory, script: Path | None = None, *options: str, code: int = 0) -> str:
    """``clusterddp submit --local`` with two ranks, or of the run again; what it says."""
    shape = [str(script), "--device", "cpu", "--gpus", "2"] if script else []
    return clusterddp("submit", *shape, "--local", "--run-dir", run, *options, code=code).stderr


@pytest.mark.product  # test_exact_resume.py has float16 and pieces in other loops
def test_mixed_precision_accumulates_over_pieces_and_resumes_with_the_scale(tmp_path: Path) -> None:
    """The global batch of the job definition: two pieces per rank and step. Only the preempted run has a supervisor."""
    whole, preempted = RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "preempted")
    script, steps = RECIPES / "mixed_precision.py", ["--steps", "60"]
    stop = ["--set", "global_batch=64", "--", "", str(STOP), str(script), *steps]
    said = submit(preempted, HARNESS, *stop, code=130)
    assert f"at step {STOP + 1}, " in said and f"Checkpoint {STOP + 1} is saved" in said
    assert "32 samples per rank and step, at most 16 at a time" in submit(preempted)
    assert preempted.attempts() == [0, 1], story(preempted)
    whole.create()
    whole.create_attempt()
    shutil.copy(preempted.job_file, whole.job_file)
    ranks: dict[str, Any] = {
        "CLUSTERDDP_RUN_DIR": str(whole.path),
        "CLUSTERDDP_ATTEMPT": "0",
        "CLUSTERDDP_DEVICE": "cpu",
    }
    ddp.run(script, *steps, ranks=2, folder=tmp_path / "out", **ranks)
    check_same(preempted, whole)
    assert {line["scale"] for line in whole.metrics()} - {2.0**16}, "no step was skipped: the scale was never changed"


@pytest.mark.product
@pytest.mark.parametrize("recipe", STEPS)
def test_a_recipe_preempted_by_submit_ends_as_the_undisturbed_run(tmp_path: Path, recipe: str) -> None:
    """With more steps, since the preemption takes some."""
    require(*PACKAGES.get(recipe, ()))
    whole, preempted = RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "preempted")
    options = ["--", "--steps", "1000"]
    script = RECIPES / f"{recipe}.py"
    submit(whole, script, *options)
    with preempting(STOP):
        submit(preempted, script, *options)
    assert preempted.attempts() == [0, 1], story(preempted)
    check_same(preempted, whole, doubt=DOUBTS.get(recipe, ""))
