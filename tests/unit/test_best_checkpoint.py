"""Which checkpoint is the best: the rule, what files and history say of it, export and status."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from clusterddp.checkpoint.store import Checkpoints, choose, with_recorded_best
from clusterddp.cli import checkpoints
from clusterddp.cli.command_line import command
from clusterddp.cli.status import described
from clusterddp.errors import CheckpointError, UsageError
from clusterddp.jobdef.job import Keep
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.summary import BestSaved, best_saved
from clusterddp.runs import recording
from clusterddp.training.best_checkpoint import BestSoFar, with_best
from tests.checkpoint_files import save
from tests.fake_slurm import FakeSlurm
from tests.histories import view
from tests.runs_on_disk import event, recorded_run, started
from tests.wording import raises, says


@pytest.mark.parametrize(
    ("best", "rule"),
    [
        ("accuracy", "accuracy max"),
        ("-loss", "loss min"),
        ("loss", "loss min"),
        ("val_loss", "val_loss min"),
        ("score min", "score min"),
        ("loss max", "loss max"),
        ("top-1", "top-1 max"),
        ("lossless", "lossless max"),
    ],
)
def test_the_smallest_loss_is_best_and_the_largest_of_others_unless_the_rule_says_so(best: str, rule: str) -> None:
    assert with_best(Keep(2), best).best_rule == rule
    assert with_best(Keep(2), best).last == 2


@pytest.mark.parametrize("best", ["", "-", "-loss min", "a b"])
def test_a_rule_that_names_no_metric_is_refused(best: str) -> None:
    with raises(ValueError):
        with_best(Keep(), best)


def test_the_job_definition_takes_precedence_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    keep = Keep(best="f1", best_is="max")
    assert with_best(keep, None) == with_best(keep, "f1") == keep
    assert capsys.readouterr().err == ""
    assert with_best(keep, "-loss") == keep
    says(capsys.readouterr().err)
    assert with_best(keep, "-loss", warns=False) == keep
    assert capsys.readouterr().err == ""


def test_a_value_counts_once_it_is_saved_and_not_if_that_failed() -> None:
    best = BestSoFar(Keep(best="loss", best_is="min"))
    assert best.facts() == {"best": "loss min"}
    saved = []
    for value in (2.0, 3.0, math.nan, 1.0):
        best.value = value
        if best.better:
            saved.append(best.save())
    assert saved == [{"loss": 2.0}, {"loss": 1.0}]
    assert best.facts() == {"best": "loss min", "metrics": json.dumps({"loss": 1.0})}
    best.value = 0.5
    best.save()
    best.failed()
    best.value = 0.7
    assert best.better


def run_with(path: Path, values: dict[int, float], rule: str | None = "f1 max") -> RunDirectory:
    run = recorded_run(path, [started(0)])
    Checkpoints(run, 0, Keep()).record_resume(None)
    for step, value in values.items():
        facts = {"metrics": json.dumps({"f1": value}), **({"best": rule} if rule else {})}
        save(run, 0, step, {"model": {"weight": torch.full((1,), float(step))}}, keep=Keep(9), facts=facts)
    return run


def exported(*words: object) -> int:
    parser = argparse.ArgumentParser()
    checkpoints.add_export_arguments(parser)
    return checkpoints.run_export(parser.parse_args(list(map(str, words))), None)


def test_the_best_is_exported_by_the_rule_in_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_with(tmp_path / "run", {10: 0.5, 20: 0.875, 30: 0.75})
    a, b, c = (tmp_path / name for name in ("a.pt", "b.pt", "c.pt"))
    for target, words in ((a, (run, "best", a)), (b, ("--best", run, b)), (c, (run, "best", c, "--best"))):
        assert exported(*words) == 0
        assert float(torch.load(target, weights_only=True)["weight"]) == 20.0
        assert capsys.readouterr().out == f"wrote model of checkpoint 20 (the best: f1 0.875) to {target}\n"
    with raises(UsageError):
        exported("--best", run, "10", tmp_path / "d.pt")
    with pytest.raises(SystemExit):
        exported(run, "newest", tmp_path / "d.pt")
    found, step = recording.parse(f"{run}@best")
    assert choose(found, step).step == 20


def test_the_job_definitions_rule_counts_for_files_of_older_versions(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", {10: 0.5, 20: 0.875}, rule=None)
    assert choose(run, "best", Keep(best="f1", best_is="min")).step == 10
    with raises(CheckpointError):
        choose(run, "best")
    with raises(CheckpointError):
        choose(run, "best", Keep(best="loss"))
    written = run_with(tmp_path / "other", {10: 0.5})
    assert with_recorded_best(Keep(), Checkpoints(written, 0, Keep()).candidates()).best_rule == "f1 max"
    assert with_recorded_best(Keep(best="x"), Checkpoints(written, 0, Keep()).candidates()).best == "x"


def test_status_and_list_name_the_best_by_the_number_that_export_takes(
    tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint: dict[str, Any] = {"blocked_s": 0.0, "durable_s": 0.1, "bytes": 1}
    events = [
        *(started(0), event("training", step=0)),
        event("checkpoint", step=10, best={"f1": 0.5}, **checkpoint),
        event("checkpoint", step=20, best={"f1": 0.875}, **checkpoint),
        event("checkpoint", step=30, **checkpoint),
    ]
    run = recorded_run(tmp_path / "run", events, metrics=[{"step": 29, "time": 1.0, "attempt": 0, "f1": 0.25}])
    assert "\nbest      f1 0.875, checkpoint 20\n" in described(run)
    assert best_saved(view(events)) == BestSaved(20, "f1", 0.875)
    resumed = event("resumed", 1, step=10, parent={"attempt": 0, "step": 10}, inexact=[])
    assert best_saved(view([*events, resumed])) == BestSaved(10, "f1", 0.5)
    assert best_saved(view([*events, event("training", 1, step=0)])) is None
    (page,) = [run.path.parent / "page.html"]
    assert command(["report", str(run.path), "--output", str(page)]) == 0
    assert "the best after step 20, f1 0.875" in page.read_text()
    monkeypatch.chdir(tmp_path)
    fake_slurm[""] = ""
    (run.path / "outcome.json").write_text(
        json.dumps({"state": "completed", "step": 30, "reason": "all ranks finished"})
    )
    assert command(["list", "run", "--best", "f1"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "largest f1: 0.25, run",
        "Its best value is 0.875 at checkpoint 20. Export it with: clusterddp export run best model.safetensors",
    ]
