"""Other uses of a checkpoint: more steps, a new run, an exported file. Real local runs."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from clusterddp.cli.main import main
from clusterddp.rundir.run_directory import RunDirectory
from tests.checkpoint_files import content_of
from tests.cli import clusterddp
from tests.preempted import attempt
from tests.runs_on_disk import outcome_of
from tests.waiting import differing, final_state

SCRIPT = Path(__file__).parents[1] / "scripts" / "train.py"


def submit(*arguments: object, steps: int, code: int = 0) -> subprocess.CompletedProcess[str]:
    options = ("--local", "--device", "cpu", "--set", "checkpoint.every=10 steps")
    return clusterddp("submit", *arguments, *options, "--", "--steps", steps, code=code)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run of 20 steps, to which 20 more were added, with checkpoints 20, 30 and 40."""
    run = RunDirectory(tmp_path_factory.mktemp("fork") / "source")
    for options, steps in (((), 20), (("--change",), 40)):
        submit(SCRIPT, "--run-dir", run, *options, steps=steps)
    return run


def losses(run: RunDirectory) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in run.metrics()}


@pytest.mark.product
def test_more_steps_continue_a_completed_run_as_if_it_had_never_stopped(tmp_path: Path, source: RunDirectory) -> None:
    whole = RunDirectory(tmp_path / "whole")
    attempt(whole, [SCRIPT, "--steps", 40], ranks=1).expect(0)
    assert losses(source) == losses(whole)
    assert differing(final_state(source), final_state(whole)) == []
    assert (outcome_of(source) or {})["step"] == 40 and source.attempts() == [0, 1]


def test_a_fork_continues_from_another_runs_step_and_does_not_change_that_run(
    tmp_path: Path, source: RunDirectory
) -> None:
    before = {path: path.stat().st_mtime_ns for path in source.path.rglob("*")}
    fork = RunDirectory(tmp_path / "fork")
    done = submit("--fork", f"{source}@20", "--run-dir", fork, steps=40)
    assert f"starts from checkpoint 20 of {source}" in done.stderr
    assert losses(fork) == {step: loss for step, loss in losses(source).items() if step >= 20}
    assert differing(final_state(fork), final_state(source)) == []
    assert outcome_of(fork) == {"state": "completed", "step": 40, "attempts": 1, "reason": "all ranks finished"}
    assert {path: path.stat().st_mtime_ns for path in source.path.rglob("*")} == before


def test_without_a_step_a_fork_begins_with_the_newest_whole_checkpoint(tmp_path: Path, source: RunDirectory) -> None:
    fork = RunDirectory(tmp_path / "fork")
    submit("--fork", source, "--run-dir", fork, steps=45)
    assert sorted(losses(fork)) == list(range(40, 45))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--fork", "{source}@7"), "has no checkpoint of step 7. Available steps: 20, 30, 40"),
        (("--fork", "{source}/nowhere"), "expected RUN, RUN@STEP or RUN@best"),
        (
            ("--fork", "{source}", "--run-dir", "{source}"),
            "already holds a run. With --fork, choose a different --run-dir",
        ),
        (("--fork", "{source}", "--change"), "cannot be combined with --here or --change"),
    ],
)
def test_an_impossible_fork_is_refused_and_leaves_nothing(
    tmp_path: Path, source: RunDirectory, arguments: Any, words: str
) -> None:
    given = [argument.format(source=source) for argument in arguments]
    folder = [] if "--run-dir" in given else ["--run-dir", tmp_path / "fork"]
    done = clusterddp("submit", *given, *folder, "--local", "--device", "cpu", code=None)
    assert done.returncode in (1, 2) and words in done.stderr, done.stderr
    assert not (tmp_path / "fork").exists()


def test_an_exported_model_loads_into_the_bare_one(tmp_path: Path, source: RunDirectory) -> None:
    weights = content_of(max(source.checkpoints.glob("step-*")))["model"]
    clusterddp("export", source, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    assert loaded.keys() == weights.keys() and all(torch.equal(loaded[name], weights[name]) for name in weights)
    clusterddp("export", source, 30, tmp_path / "all.pt", "--all")
    everything = torch.load(tmp_path / "all.pt", weights_only=True)
    assert everything["progress"]["step"] == 30 and "velocities" in everything["optimizer"]


def test_safetensors_reads_the_export_and_the_checkpoint_itself(tmp_path: Path, source: RunDirectory) -> None:
    newest = max(source.checkpoints.glob("step-*"))
    weights = content_of(newest)["model"]
    clusterddp("export", source, tmp_path / "model.safetensors")
    exported = load_file(tmp_path / "model.safetensors")
    whole = load_file(newest)
    for name, weight in weights.items():
        assert torch.equal(exported[name], weight) and torch.equal(whole[f"model.{name}"], weight)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("model.bin",), "expected a file name that ends in .pt, .pth or .safetensors"),
        (("there.pt",), "already exists"),
        (("model.pt", "--part", "ema"), "has no part 'ema', only model, optimizer"),
        (("no_such_folder/model.pt",), "no_such_folder/model.pt: No such file or directory"),
        (("model.safetensors", "--part", "optimizer"), "safetensors supports only parts whose values are all tensors"),
    ],
)
def test_an_impossible_export_names_the_alternatives(
    tmp_path: Path, source: RunDirectory, capsys: pytest.CaptureFixture[str], arguments: Any, words: str
) -> None:
    (tmp_path / "there.pt").touch()
    file, *rest = arguments
    with pytest.raises(SystemExit) as ended:  # in this process, which has imported torch
        main(["export", str(source), str(tmp_path / file), *rest])
    said = capsys.readouterr().err
    assert ended.value.code in (1, 2) and words in said, said
    assert [path.name for path in tmp_path.iterdir()] == ["there.pt"]
