"""The first commands that a newcomer types, right or wrong, and each command's help."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from clusterddp import __version__
from clusterddp.cli.command_line import COMMANDS, DESCRIPTIONS, command, parser
from clusterddp.errors import SlurmUnavailable, UsageError
from clusterddp.jobdef.job import Job
from clusterddp.runs.recording import choose_run_directory
from clusterddp.slurm.resources import fit_to_cluster
from tests.fake_slurm import FakeSlurm
from tests.wording import raises


def test_without_a_command_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """On standard error, with the exit code of wrong usage."""
    assert command([]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.findall(r"^    (\w+) ", shown.err, re.MULTILINE) == list(COMMANDS)


@pytest.mark.parametrize(
    "word",
    [
        "train.py",
        "jobs/net.yaml",
        "statsu",
    ],
)
def test_a_misspelled_command_gets_the_right_one_suggested(word: str) -> None:
    with raises(UsageError):
        command([word, "--nodes", "2"])


@pytest.mark.parametrize("word", ["run", "tell"])
def test_a_word_that_is_part_of_a_command_gets_no_suggestion(word: str) -> None:
    """``prune`` and ``shell`` have most of its letters, and nothing to do with it."""
    with raises(UsageError) as refused:
        command([word, "runs/train-0"])
    assert "Did you mean" not in str(refused.value)


def test_a_script_option_before_the_dashes_gets_a_hint() -> None:
    with raises(UsageError):
        command(["submit", "train.py", "--lr"])


@pytest.mark.parametrize(
    ("words", "near"),
    [(["submit", "train.py", "--gpu-per-node", "2"], "--gpus-per-node"), (["list", "--wach=5"], "--watch")],
)
def test_a_misspelled_option_gets_the_right_one_suggested(words: list[str], near: str) -> None:
    with raises(UsageError) as refused:
        command(words)
    assert near in str(refused.value)


def test_an_option_that_resembles_none_of_the_command_gets_no_suggestion() -> None:
    with raises(UsageError) as refused:
        command(["report", "runs/a", "--sweep"])
    assert "Did you mean" not in str(refused.value)


def test_a_home_that_the_shell_left_in_an_option_is_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shells expand ``--run-dir ~/x``, but not ``--run-dir=~/x``."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (script := tmp_path / "train.py").touch()
    assert command(["submit", str(script), "--device=cpu", "--run-dir=~/x", "--dry-run"]) == 0
    assert f"{tmp_path}/x/logs" in capsys.readouterr().out


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        command(["--version"])
    assert (exited.value.code, capsys.readouterr().out) == (0, f"clusterddp {__version__}\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_describes_itself_and_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        parser().parse_args([name, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert exited.value.code == 0 and DESCRIPTIONS[name] in shown and shown.startswith(f"usage: clusterddp {name} ")


def test_without_a_cluster_the_message_names_local_runs(fake_slurm: FakeSlurm) -> None:
    """Slurm's commands are installed there, and find no controller."""
    fake_slurm[""] = SlurmUnavailable("`sinfo` failed: sinfo: fatal: no configuration source")
    with raises(SlurmUnavailable):
        fit_to_cluster(Job(name="net", script="net.py"), required=True)


def test_a_wrong_path_of_a_run_to_continue_does_not_start_the_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a script, --run-dir continues a run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CLUSTERDDP_RUNS", raising=False)
    run = tmp_path / "runs" / "train-0"
    (run / "private").mkdir(parents=True)
    (run / "job.yaml").write_text("module: net\n")
    with raises(UsageError):
        command(["submit", "--run-dir", "runs/tarin-0"])
    assert not (tmp_path / "runs" / "tarin-0").exists()


def test_an_empty_variable_is_no_folder_for_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for `list`: otherwise it would not find what submit starts."""
    monkeypatch.setenv("CLUSTERDDP_RUNS", "")
    assert choose_run_directory(None, Job(name="net", script="net.py")).path == Path("runs/net-0").absolute()
