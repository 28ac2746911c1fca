"""The members of a sweep are compared at equal steps, and the best one is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from clusterddp.cli.command_line import command
from clusterddp.errors import UsageError
from clusterddp.jobdef.job import Job
from clusterddp.report.ranking import ranked
from clusterddp.rundir.files import append_line, write_json
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.summary import Summary
from clusterddp.runs.sweep_members import Record, best, common_steps, compare, metric_of
from clusterddp.runs.sweep_submission import SweepFolder
from clusterddp.slurm.run_states import RunState
from tests.wording import raises

STEPS = {"lr=1,seed=0": 30, "lr=1,seed=1": 12, "lr=2,seed=0": 0, "lr=2,seed=1": 3}
STATES = {"lr=1,seed=0": "completed", "lr=1,seed=1": "running", "lr=2,seed=0": "pending", "lr=2,seed=1": "failed"}


def accuracy(name: str, step: int) -> float:
    return step + (0.5 if name == "lr=1,seed=1" else 0.0)


@pytest.fixture
def members(tmp_path: Path) -> list[tuple[Summary, RunState]]:
    """One completed, one under way, one that waits for its first attempt, one that failed early. The accuracy is logged
    after every fourth step."""
    values = {name: dict(pair.split("=") for pair in name.split(",")) for name in STEPS}
    table = {name: {f"args.{key}": value for key, value in pairs.items()} for name, pairs in values.items()}
    SweepFolder(tmp_path).write(Record(Job(name="x", script="/x.py"), table))
    found = []
    for name, steps in STEPS.items():
        run = RunDirectory(tmp_path / name)
        run.create()
        newest: dict[str, object] = {}
        for step in range(steps):
            more = {"accuracy": accuracy(name, step)} if step % 4 == 3 else {}
            newest = {"step": step, "attempt": 0, "loss": 1 / (step + 1), **more}
            append_line(run.metrics_file, newest)
        metrics = {**newest, "accuracy": accuracy(name, steps // 4 * 4 - 1)} if steps > 3 else newest
        found.append((Summary(run, name, sweep="s", step=steps or None, metrics=metrics), RunState(STATES[name], "")))
    return found


def test_metrics_are_those_after_the_steps_that_all_members_under_way_have_done(
    members: list[tuple[Summary, RunState]],
) -> None:
    """The newest values up to there, also of a metric that not every step logs; the failed member has its own."""
    assert common_steps(members) == 12
    compared = compare(members, ["loss", "accuracy"])
    assert compared is not None and compared.steps == 12
    metrics = {summary.run.path.name: summary.metrics for summary, _ in compared.members}
    assert {name: found.get("accuracy") for name, found in metrics.items()} == {
        "lr=1,seed=0": 11.0,
        "lr=1,seed=1": 11.5,
        "lr=2,seed=0": None,
        "lr=2,seed=1": None,
    }
    assert [found.get("step") for found in metrics.values()] == [11, 11, None, 2]
    assert compared.sentence == "Metrics after 12 steps, which all members in progress have reached"


def test_without_a_member_under_way_each_has_its_newest_metrics(members: list[tuple[Summary, RunState]]) -> None:
    ended = [(summary, RunState("completed", "")) for summary, _ in members]
    compared = compare(ended, ["loss"])
    assert compared is not None and compared.steps is None and compared.members == ended


def test_the_values_of_each_key_are_found_by_member(members: list[tuple[Summary, RunState]]) -> None:
    compared = compare(members, [])
    assert compared is not None
    by_name = {key: {path.name: value for path, value in values.items()} for key, values in compared.values.items()}
    assert by_name["lr="] == {name: name[3] for name in STEPS} and by_name["seed="] == {
        name: name[-1] for name in STEPS
    }


def test_runs_that_are_not_of_one_sweep_are_not_compared(
    members: list[tuple[Summary, RunState]], tmp_path: Path
) -> None:
    other = Summary(RunDirectory(tmp_path / "other"), "other")
    assert compare([*members, (other, RunState("running", ""))], []) is None
    assert compare([], []) is None


def test_the_best_member_is_named_at_equal_steps(members: list[tuple[Summary, RunState]]) -> None:
    """The one that has trained for longer has no advantage; one that failed does not win."""
    compared = compare(members, ["loss", "accuracy"])
    assert compared is not None
    found = best(compared.members, "accuracy")
    assert found.run.path.name == "lr=1,seed=1" and found.sentence == "largest accuracy: 11.5, lr=1,seed=1"
    assert best(members, "accuracy").run.path.name == "lr=1,seed=0"
    assert best(members, "loss").sentence == "smallest loss: 0.0333333, lr=1,seed=0"
    assert best(members, "loss max").run.path.name == "lr=1,seed=1"
    with raises(UsageError):
        best(members, "f1")
    with raises(UsageError):
        best(members, "f1 maximum")


def test_of_members_with_equal_values_the_first_by_name_is_best_everywhere(
    members: list[tuple[Summary, RunState]],
) -> None:
    """In ``list --best`` as in the report, in whichever order they were found."""
    equal = [(replace(one, metrics={"accuracy": 0.5}), RunState("completed", "")) for one, _ in members]
    value = {"name": "accuracy", "best": {"smallest": False}, "last": {"value": 0.5}}
    for found in (equal, equal[::-1]):
        assert best(found, "accuracy").run.path.name == "lr=1,seed=0"
        runs = [{"name": one.run.path.name, "state": "completed", "metrics": [value]} for one, _ in found]
        assert ranked(runs, "accuracy")[0]["name"] == "lr=1,seed=0"


@pytest.mark.parametrize(
    ("text", "smallest"),
    [
        ("val_loss", True),
        ("trainloss", True),
        ("eval/ppl", True),
        ("accuracy", False),
        ("power", False),
        ("f1 min", True),
    ],
)
def test_of_a_loss_the_smallest_value_is_best(text: str, smallest: bool) -> None:
    assert metric_of(text)[1] is smallest


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[list[list[str]], str]:
    """The words of each line that ``clusterddp list`` prints, and what it says beside them."""
    assert command(["list", *words]) == 0
    shown = capsys.readouterr()
    return [line.split() for line in shown.out.splitlines()], shown.err


def test_list_shows_the_keys_of_a_sweep_and_names_the_best_member(
    members: list[tuple[Summary, RunState]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a column per key, by which it sorts as numbers; and the command that exports the model."""
    for summary, _ in members:
        summary.run.job_file.write_text("")
        write_json(summary.run.outcome_file, {"state": "completed", "step": summary.step, "reason": "done"})
    lines, said = listed(capsys, str(tmp_path), "--sort", "lr", "--reverse", "--best", "accuracy")
    assert lines[0][:4] == ["RUN", "STATE", "LR=", "SEED="] and "ACCURACY" in lines[0]
    assert [line[2] for line in lines[1:5]] == ["2", "2", "1", "1"]
    assert lines[5:] == [
        ["largest", "accuracy:", "27,", "lr=1,seed=0"],
        ["Export", "it", "with:", "clusterddp", "export", str(tmp_path / "lr=1,seed=0"), "model.safetensors"],
    ]
    assert said == "Metrics: the newest values of each member\n"
    assert command(["list", str(tmp_path), "--best", "loss", "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["run"] == str(tmp_path / "lr=1,seed=0")
