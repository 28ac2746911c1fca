"""Shell completion: the committed files belong to the present options, and bash completes words with them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from clusterddp.cli.command_line import COMMANDS
from docs.reference import completion

#: Completes the last of the words "$@", as bash does after a Tab.
TAB = """
source "$FILE"
[[ $(complete -p clusterddp) =~ -F\\ ([^ ]+) ]]
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
"${BASH_REMATCH[1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def complete(folder: Path, *words: str) -> list[str]:
    """What bash offers for the last word."""
    environment = {"FILE": str(completion.FOLDER / completion.FILES["bash"]), "PATH": ""}
    bash = shutil.which("bash") or "bash"
    done = subprocess.run(
        [bash, "--norc", "-c", TAB, "tab", "clusterddp", *words],
        cwd=folder, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return sorted(done.stdout.split())


@pytest.mark.parametrize("name", completion.FILES.values())
def test_the_committed_files_have_the_present_options(name: str) -> None:
    assert (completion.FOLDER / name).read_text() == completion.files()[name], "out of date: run `make completion`"


def test_bash_completes_commands_options_and_words(tmp_path: Path) -> None:
    """Also the actions of a command, and the values of an option that has a few."""
    assert set(complete(tmp_path, "")) >= COMMANDS.keys()
    assert complete(tmp_path, "conf") == ["config"]
    assert complete(tmp_path, "config", "v") == ["validate"]
    assert complete(tmp_path, "submit", "--loc") == ["--local"]
    assert complete(tmp_path, "submit", "--device", "c") == ["cpu", "cuda"]


def test_bash_completes_runs_as_folders(tmp_path: Path) -> None:
    """A file is no run; a job definition is a file."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "rules.yaml").touch()
    assert complete(tmp_path, "status", "ru") == ["runs"]
    assert complete(tmp_path, "submit", "--run-dir", "ru") == ["runs"]
    assert "rules.yaml" in complete(tmp_path, "config", "validate", "ru")


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_accepts_its_file() -> None:
    """Without running it: completion needs a terminal."""
    subprocess.run(["zsh", "-n", completion.FOLDER / completion.FILES["zsh"]], check=True)
