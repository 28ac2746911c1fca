"""Jobs that read data in their own way, or train in another shape, preempted where that matters: to the last bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp
from tests.packages import require
from tests.preempted import check_same, train_twice
from tests.trainings import events_of

JOBS = ddp.REPOSITORY / "jobs"


def test_every_job_is_on_the_page() -> None:
    page = (JOBS / "README.md").read_text()
    files = {path.name for pattern in ("*.py", "*.yaml") for path in JOBS.glob(pattern)}
    assert set(re.findall(r"`([\w.]+\.(?:py|yaml))`", page)) == files


def trained(
    folder: Path, job: str, *arguments: object, stops: list[int], resumed: list[int], said: str, **environment: Any
) -> RunDirectory:
    """The undisturbed run, the same as the one that was preempted in the steps ``stops`` and resumed at ``resumed``."""
    preempted, whole, output = train_twice(folder, [JOBS / f"{job}.py", *arguments], stops, **environment)
    assert [event["step"] for event in events_of(preempted, "resumed")] == resumed
    check_same(preempted, whole, attempts=len(stops) + 1)
    assert re.search(said, output), output
    return whole


def mean_of(run: RunDirectory, name: str, steps: range) -> float:
    values = {line["step"]: line[name] for line in run.metrics()}
    return sum(float(values[step]) for step in steps) / len(steps)


@pytest.mark.product  # unit/test_orders.py has weighted draws
def test_weighted_digits_preempted_around_an_epochs_end_draws_rare_digits_as_often_as_others(tmp_path: Path) -> None:
    """An epoch is 12.02 steps; one image in 14 is of a rare digit."""
    said = r"769 training images, 7% of them of 5 to 9\ntest images that are recognized: \d+% of 5 to 9, \d+% of"
    options = ["--steps", 30, "--workers", 1]
    run = trained(tmp_path, "weighted_digits", *options, stops=[11, 12], resumed=[12, 13], said=said)
    assert 0.4 < mean_of(run, "rare", range(30)) < 0.6


@pytest.mark.product  # test_orders.py resumes an order
def test_bucketed_text_preempted_around_an_epochs_end_has_little_padding(tmp_path: Path) -> None:
    """An epoch is 24 steps of 16 lines; with lines of any length in a batch, half of the characters are padding."""
    said = r"392 lines of \d+ to \d+ characters"
    options = ["--steps", 28, "--lines", 392, "--global-batch", 16, "--width", 8]
    run = trained(tmp_path, "bucketed_text", *options, stops=[23, 24], resumed=[24, 25], said=said)
    assert mean_of(run, "padding", range(24)) < 0.2


@pytest.mark.product  # test_many_models.py has two models
def test_gan_preempted_is_the_same_for_both_models_and_optimizers(tmp_path: Path) -> None:
    said = r"the generated points are at \d\.\d+ from the center on average"
    trained(tmp_path, "gan", "--steps", 40, stops=[0, 20], resumed=[1, 21], said=said)


def test_early_stopping_preempted_in_evaluations_ends_at_the_best_loss_and_some_evaluations(tmp_path: Path) -> None:
    """Evaluations are 10 steps apart, the fourth without an improvement is the end, and it is repeated by a resume."""
    said = r"ended after 101 of 2000 steps, best held-out loss \d+\.\d+"
    run = trained(tmp_path, "early_stopping", "--steps", 2000, stops=[70, 85, 100], resumed=[70, 86, 100], said=said)
    losses = {line["step"]: line["held_out_loss"] for line in run.metrics() if "held_out_loss" in line}
    best = min(losses, key=losses.__getitem__)
    assert (run.metrics() or [])[-1]["step"] == max(losses) == best + 40 == 100


# unit/test_external_loader.py has the dataset's state, gpu/test_jobs.py runs the job.
@pytest.mark.product
@pytest.mark.parametrize("stops", [[3], [0, 4, 5, 10]])
def test_hf_streaming_preempted_within_and_between_passes_reads_the_same_lines(
    tmp_path: Path, stops: list[int]
) -> None:
    """A pass of rank 0 over its file takes five steps or so, and one of rank 1 a single step."""
    require("datasets")
    options, offline = ["--steps", 14, "--files", 2], {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    resumed = [stop + 1 for stop in stops]
    said = r"2 files, 2 passes over them on rank 0"
    trained(tmp_path, "hf_streaming", *options, stops=stops, resumed=resumed, said=said, **offline)
