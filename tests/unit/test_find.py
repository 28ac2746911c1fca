"""Which runs words name, and which run is proposed for a wrong path."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from clusterddp.errors import RunDirectoryError
from clusterddp.rundir.run_directory import find_runs, names_exactly, open_run, runs_folder
from tests.other_user import UID


def make_run(folder: Path) -> None:
    (folder / "private").mkdir(parents=True)
    (folder / "job.yaml").touch()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with two runs, a sweep of two, and a folder that is no run."""
    for name in ("runs/train-0", "runs/train-1", "runs/lr/lr=0.1", "runs/lr/lr=0.2", "runs/logs/deep/er"):
        (tmp_path / name).mkdir(parents=True)
        if "logs" not in name:
            make_run(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CLUSTERDDP_RUNS", raising=False)
    return tmp_path


def names(*words: str) -> list[str]:
    return [run.path.name for run in find_runs(words)]


def test_without_words_all_runs_of_the_runs_folder_are_found_with_those_of_sweeps(here: Path) -> None:
    """One level down, and no deeper."""
    make_run(here / "runs/logs/deep/er")
    assert names() == ["lr=0.1", "lr=0.2", "train-0", "train-1"]


def test_a_link_whose_end_cannot_be_seen_hides_no_run(here: Path) -> None:
    """One in a circle; one into a folder of another user gives the same kind of error."""
    (here / "runs/circle").symlink_to("circle")
    (here / "runs/lr/circle").symlink_to("circle")
    assert names() == ["lr=0.1", "lr=0.2", "train-0", "train-1"]


@pytest.mark.parametrize("words", [(), ("runs",), ("runs/*",)])
def test_a_folder_with_nothing_but_a_job_definition_is_no_run_unless_it_is_named(
    here: Path, words: tuple[str, ...]
) -> None:
    """It may be the user's own."""
    (here / "runs/mine").mkdir()
    (here / "runs/mine/job.yaml").touch()
    assert names(*words) == ["lr=0.1", "lr=0.2", "train-0", "train-1"]
    assert names("runs/mine") == ["mine"]


def test_the_runs_folder_is_the_one_of_new_runs(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty variable counts as unset; a folder that does not exist yet has no runs."""
    monkeypatch.setenv("CLUSTERDDP_RUNS", str(here / "runs/lr"))
    assert names() == ["lr=0.1", "lr=0.2"]
    assert runs_folder({"CLUSTERDDP_RUNS": ""}) == Path("runs")
    monkeypatch.setenv("CLUSTERDDP_RUNS", str(here / "later"))
    assert names() == []


def test_words_are_runs_folders_and_patterns_and_each_run_is_found_once(here: Path) -> None:
    """A pattern may also match what is no run."""
    assert names("runs/train-1", "runs/lr", "runs/train-*") == ["train-1", "lr=0.1", "lr=0.2", "train-0"]
    assert names(f"{here}/runs/*") == ["lr=0.1", "lr=0.2", "train-0", "train-1"]


def test_a_folder_that_looks_like_a_pattern_is_itself(here: Path) -> None:
    """Shells leave such names alone, too."""
    (here / "runs/lr[1] ä").mkdir()
    (here / "runs/lr[1] ä/job.yaml").touch()
    assert names("runs/lr[1] ä") == ["lr[1] ä"]


def test_a_pattern_that_is_none_is_reported_as_such(here: Path) -> None:
    """Before Python 3.13 two stars are a folder's whole name; later they find nothing."""
    with pytest.raises(RunDirectoryError, match=r"runs/x\*\*: no "):
        names("runs/x**")


def test_a_sweep_is_no_run_and_its_links_to_members_are_no_other_runs(here: Path) -> None:
    """Also for a pattern, which matches the folder of its arrays."""
    (here / "runs/lr/sweep.yaml").touch()
    (here / "runs/lr/arrays/0").mkdir(parents=True)
    (here / "runs/lr/arrays/0/0").symlink_to("../../lr=0.1")
    assert names("runs/lr", "runs/lr/*") == ["lr=0.1", "lr=0.2"]
    with pytest.raises(RunDirectoryError, match="It is a sweep. List its members with `clusterddp list runs/lr`"):
        open_run("runs/lr")


def test_a_run_has_a_short_name_wherever_the_runs_are(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative to $CLUSTERDDP_RUNS or ./runs, unless there is such a run here; members of sweeps and patterns, too."""
    assert open_run("train-0").path == here / "runs/train-0"
    make_run(here / "elsewhere/train-0")
    monkeypatch.setenv("CLUSTERDDP_RUNS", str(here / "elsewhere"))
    assert open_run("train-0").path == here / "elsewhere/train-0"
    assert [run.path for run in find_runs(["train-*"])] == [here / "elsewhere/train-0"]
    monkeypatch.setenv("CLUSTERDDP_RUNS", "runs")
    assert open_run("lr/lr=0.1").path == here / "runs/lr/lr=0.1"
    assert names("lr", "train-1") == ["lr=0.1", "lr=0.2", "train-1"]
    make_run(here / "train-0")
    (here / "train-1").mkdir()
    assert (open_run("train-0").path, open_run("train-1").path) == (here / "train-0", here / "runs/train-1")
    assert names_exactly("train-1", open_run("train-1")) and not names_exactly("newest", open_run("newest"))


def test_the_newest_run_is_the_one_that_its_user_submitted_last(here: Path) -> None:
    """A folder of that name is what it is; another user's run is not meant."""
    os.utime(here / "runs/train-0/job.yaml", (2e9, 2e9))
    assert open_run("newest").path.name == "train-0" and names("newest") == ["train-0"]
    os.utime(here / "runs/lr/lr=0.2/job.yaml", (3e9, 3e9))
    assert open_run("newest").path.name == "lr=0.2"
    if os.geteuid() == 0:
        os.chown(here / "runs/lr/lr=0.2/job.yaml", UID, UID)
        assert open_run("newest").path.name == "train-0"
    make_run(here / "newest")
    assert open_run("newest").path == here / "newest"
    shutil.rmtree(here / "newest")
    shutil.rmtree(here / "runs")
    with pytest.raises(RunDirectoryError, match="newest: you have no run in runs"):
        open_run("newest")


@pytest.mark.parametrize(
    ("path", "proposal"),
    [
        ("train-11", ". Did you mean runs/train-1?"),
        ("runs/trian-0", ". Did you mean runs/train-0?"),
        ("lr=0.3", ". Did you mean runs/lr/lr=0."),
        ("runs/train-1/checkpoints", ". Did you mean runs/train-1?"),
    ],
)
def test_the_nearest_run_is_proposed_for_a_wrong_path(here: Path, path: str, proposal: str) -> None:
    """By its name, or because it contains the path."""
    with pytest.raises(RunDirectoryError) as error:
        open_run(path)
    assert proposal in str(error.value) and "is not a run directory (no job.yaml)" in str(error.value)
    with pytest.raises(RunDirectoryError) as error:
        find_runs([path])
    assert proposal in str(error.value) and f"{path}: no run there" in str(error.value)


def test_the_current_folder_is_not_proposed_for_a_job_definition_of_the_user(here: Path) -> None:
    """A project may keep its job.yaml beside its runs."""
    (here / "job.yaml").touch()
    with pytest.raises(RunDirectoryError, match=". Did you mean runs/train-0?"):
        open_run("runs/trian-0")
    with pytest.raises(RunDirectoryError, match="zzz: no run there. Expected a run directory or a folder of runs"):
        find_runs(["zzz"])


def test_without_a_similar_run_the_message_says_what_is_expected(here: Path) -> None:
    """Nothing is proposed at random."""
    with pytest.raises(RunDirectoryError, match="Expected the path that `clusterddp submit` printed"):
        open_run("zzz")
    with pytest.raises(RunDirectoryError, match="zzz: no run there. Expected a run directory or a folder of runs"):
        find_runs(["zzz"])
