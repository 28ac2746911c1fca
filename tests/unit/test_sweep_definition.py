"""What a sweep varies: reading it, its members, their names, and the job of each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from clusterddp.errors import JobDefinitionError, UsageError
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.load import from_values
from clusterddp.jobdef.yaml12 import node_of
from clusterddp.runs.sweep_members import (
    LONGEST_NAME,
    Record,
    default_name,
    jobs_of,
    member_name,
    named,
    of_options,
    of_python,
    read_definition,
    read_record,
)
from clusterddp.runs.sweep_submission import SweepFolder, check_marks
from tests.wording import raises

BASE = Job(name="train", script="/work/train.py", args=("--epochs", "3"), device="cpu")


def written(folder: Path, text: str) -> Path:
    path = folder / "sweep.yaml"
    path.write_text(text)
    for job in ("t.yaml", "train.yaml"):
        (folder / job).touch()
    return path


def test_a_grid_has_a_member_for_each_combination_named_by_its_values(tmp_path: Path) -> None:
    """The last key changes first, a range includes both ends, and values stay as they are written."""
    grid = "job: train.yaml\ngrid:\n  args.lr: [1e-3, .1]\n  seed: 0..2\n"
    definition = read_definition(written(tmp_path, grid))
    assert (definition.job, definition.section) == (tmp_path / "train.yaml", None)
    names = ["lr=1e-3,seed=0", "lr=1e-3,seed=1", "lr=1e-3,seed=2", "lr=.1,seed=0", "lr=.1,seed=1", "lr=.1,seed=2"]
    assert list(named(definition.members)) == names


def test_members_can_be_listed(tmp_path: Path) -> None:
    """With keys of their own; one that is given twice counts once."""
    listed = "job: {script: t.py}\nmembers:\n- {args.lr: 1e-3}\n- {args.lr: 1e-3}\n- {seed: 1, args.wd: 0}\n"
    definition = read_definition(written(tmp_path, listed))
    assert (definition.job, definition.section) == (tmp_path / "sweep.yaml", "job")
    assert list(named(definition.members)) == ["lr=1e-3", "seed=1,wd=0"]


@pytest.mark.parametrize(
    "text",
    [
        "grid: {seed: 0..1}",
        "job: t.yaml\n",
        "job: t.yml\ngrid: {seed: 1}",
        "job: .\ngrid: {seed: 1}",
        "job: t.yaml\ngrid: {seed: 1}\nmembers: [{seed: 1}]",
        "job: t.yaml\ngrid: {}",
        "job: t.yaml\ngrid: {seed: []}",
        "job: t.yaml\ngrid: {seed: 4..0}",
        "job: t.yaml\nmembers: {seed: 1}",
        "job: t.yaml\ngird: {seed: 1}",
        "job: t.yaml\ngrid: {seed: 0..999, args.a: 0..999}",
    ],
)
def test_a_mistake_is_named_with_its_place(tmp_path: Path, text: str) -> None:
    with raises(JobDefinitionError):
        read_definition(written(tmp_path, text))


def test_options_give_the_same_members() -> None:
    members = named(of_options(["lr=1e-3,1e-4", "seed=0..1"]))
    assert list(members) == ["lr=1e-3,seed=0", "lr=1e-3,seed=1", "lr=1e-4,seed=0", "lr=1e-4,seed=1"]
    assert list(named(of_options(["betas=['0.9,0.95']"]))) == ["betas=0.9,0.95"]
    with raises(UsageError):
        of_options(["lr"])
    with raises(UsageError):
        of_options(["lr=1", "lr=2"])


def test_python_values_stay_what_they_are() -> None:
    grid: dict[str, list[Any]] = {"lr": [1e-3], "sizes": [(64, 64), (8,)]}
    assert of_python(grid) == [
        {"lr": 1e-3, "sizes": (64, 64)},
        {"lr": 1e-3, "sizes": (8,)},
    ]
    assert of_python([{"lr": 1}, {"lr": 2}]) == [{"lr": 1}, {"lr": 2}]
    with raises(UsageError):
        of_python({})


def test_names_are_safe_bounded_and_different() -> None:
    """A name that had to be changed ends in a hash of the values."""
    assert member_name({"data": "a/b"}) != member_name({"data": "a b"})
    for value in ("a/b c", "$(rm)", "%j\\", "é", "x" * 500, "../..", ""):
        name = member_name({"data": value})
        assert re.fullmatch(r"[A-Za-z0-9_.+=,-]+", name) and len(name) <= LONGEST_NAME
        assert name == "data=" or re.search("-[0-9a-f]{8}$", name) or value in name


def test_different_members_of_one_name_are_refused() -> None:
    members = [{"a": node_of("1,b=2", "x")}, {"a": node_of(1, "x"), "b": node_of(2, "x")}]
    with raises(JobDefinitionError):
        named(members)
    assert len(named([members[1], members[1]])) == 1


def test_keys_that_end_alike_are_named_in_full() -> None:
    (name,) = named(of_options(["args.seed=1", "seed=2"]))
    assert name == "args.seed=1,seed=2"


def test_values_go_to_the_script_or_into_the_job() -> None:
    """As arguments after those of the job; true is the option alone, false and null are none."""
    (job,) = jobs_of(
        BASE, of_options(["lr=1e-3", "seed=7", "checkpoint.keep=2", "args.n=4", "shift=-1", "model=vit", "amp=true"])
    )
    assert job.args == ("--epochs", "3", "--lr", "1e-3", "-n", "4", "--shift=-1", "--model", "vit", "--amp")
    assert (job.seed, job.checkpoint.keep.last) == (7, 2)
    assert [job.args[2:] for job in jobs_of(BASE, of_options(["amp=true,false"]))] == [("--amp",), ()]


@pytest.mark.parametrize(
    "option",
    [
        "sead=1",
        "gpus=1,2",
        "seed=-1",
        "checkpoint.kep=1",
        "args=1",
        "env.HF_TOKEN=a,b",
        "lr=[[1,2]]",
        "l r=1",
    ],
)
def test_a_wrong_key_or_value_is_refused(option: str) -> None:
    with raises(JobDefinitionError):
        jobs_of(BASE, of_options([option]))


def test_a_record_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    """With secrets masked."""
    folder = SweepFolder(tmp_path)
    job = Job(name="train", script="/t.py", env={"HF_TOKEN": "secret-value", "A": "null"}, setup=("a: b", "'"))
    members = {"lr=1e-3": {"args.lr": "1e-3"}, "lr=no": {"args.lr": "no"}}
    folder.write(Record(job, members, {"lr=1": {"args.lr": "1"}}))
    found = read_record(tmp_path)
    assert found is not None and "secret-value" not in folder.record_file.read_text()
    assert (found.members, found.left) == (members, {"lr=1": {"args.lr": "1"}})
    assert found.job == Job(name="train", script="/t.py", env={"HF_TOKEN": "***", "A": "null"}, setup=("a: b", "'"))


def test_the_default_folder_depends_on_the_keys_alone() -> None:
    """So that the same command finds it again, and more values extend it."""
    assert default_name(BASE, ["args.lr", "seed"]) == "train-by-args.lr-seed"


def test_members_may_not_share_the_file_that_shows_that_they_are_done() -> None:
    """The first to finish would complete the others."""
    job = from_values({"module": "train", "done": "out/done"})
    with raises(UsageError):
        check_marks([job, job])
    check_marks([job, from_values({"module": "train", "done": "other"})])
    check_marks([from_values({"module": "train", "done": "{run_dir}/out/done"})] * 2)
