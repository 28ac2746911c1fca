"""``clusterddp rehearse`` with a real script, which is started, preempted and started again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterddp.cli.command_line import command
from clusterddp.errors import FAULT_FOUND, NOT_REPEATABLE, ClusterddpError, UsageError
from clusterddp.process import descendants, process_start
from clusterddp.rehearsal.confinement import is_available
from tests.cli import REPOSITORY, clusterddp
from tests.waiting import wait_until
from tests.wording import raises

SCRIPT = REPOSITORY / "tests" / "scripts" / "rehearsed.py"


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a folder."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rehearsed(folder: Path, *words: object, code: int, script: str | None = None) -> dict[str, Any]:
    """The certificate of a rehearsal of the script in a new folder, with one rank."""
    folder.mkdir(exist_ok=True)
    if script is None:
        shutil.copy(SCRIPT, folder / "train.py")
    else:
        (folder / "train.py").write_text(script)
    before = contents(folder)
    output = folder.parent / "certificate"
    output.mkdir(exist_ok=True)
    clusterddp("rehearse", "train.py", "--gpus", 1, "-o", output, *words, code=code, cwd=folder)
    assert contents(folder) == before  # the script ran in a copy
    assert (output / "rehearsal.html").read_text().startswith("<!doctype html>")
    found: dict[str, Any] = json.loads((output / "rehearsal.json").read_text())
    return found


def test_no_rank_outlives_a_rehearsal_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import pathlib, time\npathlib.Path('began').touch()\ntime.sleep(300)\n")
    command = [sys.executable, "-m", "clusterddp", "rehearse", "train.py", "--gpus", "1"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL) as process:
        wait_until(lambda: list(tmp_path.glob("rehearse-*/run-1/began")), "the script")
        ranks = descendants(process.pid)
        process.kill()
    assert ranks
    wait_until(lambda: all(process_start(pid) is None for pid in ranks), "the end of the rank")


@pytest.mark.product
def test_a_script_that_does_all_right_passes_every_disturbance(tmp_path: Path) -> None:
    """Those that it can be given: it has no evaluation and no loader."""
    found = rehearsed(tmp_path / "all", code=0)
    tried = {one["name"] for one in found["disturbances"] if one["tried"]}
    assert tried == {
        "start", "first-steps", "step", "save", "after-save", "last-step", "two-notices", "short-notice", "time-limit",
        "kill", "full-disk",
    }  # fmt: skip


@pytest.mark.product
@pytest.mark.parametrize(
    ("exit_code", "verdict", "code"), [(143, "not_repeatable", NOT_REPEATABLE), (0, "loses_work", FAULT_FOUND)]
)
def test_a_script_that_is_not_repeatable_is_judged_by_its_steps_and_files(
    tmp_path: Path, exit_code: int, verdict: str, code: int
) -> None:
    script = SCRIPT.read_text().replace("manual_seed(0)", "seed()").replace("143", str(exit_code))
    found = rehearsed(tmp_path / "random", "--only", "step,kill", code=code, script=script)
    assert (found["repeatable"], found["differs_in_step"], found["verdict"]) == (False, 0, verdict)
    kill = found["disturbances"][1]
    assert (kill["resumed_from"], kill["repeated_steps"], kill["result"]) == ("checkpoint.pt", 5, "same")


@pytest.mark.product
def test_a_script_that_seeds_nothing_is_compared(tmp_path: Path) -> None:
    script = SCRIPT.read_text().replace("torch.manual_seed(0)", "pass")
    assert rehearsed(tmp_path / "unseeded", "--only", "step", code=0, script=script)["repeatable"]


#: Scripts that cannot be rehearsed, and words of what is said about them.
REFUSED = {
    "asks for input": ("input('Go on? ')", "asks for input"),
    "fails": ("raise RuntimeError('no data')", "no data"),
    "needs a GPU": ("raise RuntimeError('Found no NVIDIA driver on your system')", "needs a GPU"),
    "takes too long": ("import time; time.sleep(600)", "--limit"),
    "makes no step": ("print('no training')", "Rank 0 printed:\nno training"),
    "trains in other processes": ("import subprocess; subprocess.run(['true'])", "other processes that it starts"),
    "writes outside": ("open('../outside/file', 'w').write('x')", "writes outside"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_script_that_cannot_be_rehearsed_is_refused_and_changes_no_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, words = REFUSED[name]
    outside = tmp_path / "outside"
    for folder in (outside, tmp_path / "own"):
        folder.mkdir()
    text = text.replace("../outside", str(outside))
    (tmp_path / "own" / "train.py").write_text(f"{text}\nopen('train.py', 'w').write('changed')\n")
    if name == "writes outside" and not is_available():
        pytest.skip("this kernel has no Landlock")
    monkeypatch.chdir(tmp_path / "own")
    before = contents(tmp_path)
    with raises(ClusterddpError) as refused:
        command(["rehearse", "train.py", "--gpus", "1", "--limit", "3"])
    assert words in str(refused.value)
    assert contents(tmp_path) == before


def test_a_folder_that_is_too_large_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('started')\n")
    with open(tmp_path / "data.bin", "wb") as data:
        data.truncate(200_000_000)
    monkeypatch.chdir(tmp_path)
    with raises(UsageError):
        command(["rehearse", "train.py"])
