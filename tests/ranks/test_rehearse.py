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

from clusterddp.errors import NOT_REPEATABLE
from clusterddp.process import descendants, process_start
from clusterddp.rehearsal.confinement import is_available
from tests.cli import REPOSITORY, clusterddp
from tests.waiting import wait_until

SCRIPT = REPOSITORY / "tests" / "scripts" / "rehearsed.py"


def rehearsed(folder: Path, *words: object, code: int, script: str | None = None) -> dict[str, Any]:
    """The certificate of a rehearsal of the script in a folder of its own, with one rank."""
    folder.mkdir(exist_ok=True)
    if script is None:
        shutil.copy(SCRIPT, folder / "train.py")
    else:
        (folder / "train.py").write_text(script)
    before = sorted(folder.iterdir())
    output = folder.parent / "certificate"
    output.mkdir(exist_ok=True)
    clusterddp("rehearse", "train.py", "--gpus", 1, "-o", output, *words, code=code, cwd=folder)
    assert sorted(folder.iterdir()) == before  # the script ran in a copy
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
        "start", "first-steps", "step", "save", "after-save", "last-step", "two-notices", "short-notice", "kill",
        "full-disk",
    }  # fmt: skip


@pytest.mark.product
def test_a_script_that_is_not_repeatable_is_not_compared(tmp_path: Path) -> None:
    script = SCRIPT.read_text().replace("manual_seed(0)", "seed()")
    found = rehearsed(tmp_path / "random", "--only", "step", code=NOT_REPEATABLE, script=script)
    assert (found["verdict"], found["disturbances"]) == ("not_repeatable", [])


@pytest.mark.product
def test_a_script_that_seeds_nothing_is_compared(tmp_path: Path) -> None:
    script = SCRIPT.read_text().replace("torch.manual_seed(0)", "pass")
    assert rehearsed(tmp_path / "unseeded", "--only", "step", code=0, script=script)["repeatable"]


@pytest.mark.product
@pytest.mark.skipif(not is_available(), reason="this kernel has no Landlock")
def test_writes_outside_the_copy_are_refused(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    script = SCRIPT.read_text().replace('"out/checkpoint.pt"', f'"{outside}/checkpoint.pt"')
    (tmp_path / "writes").mkdir()
    (tmp_path / "writes" / "train.py").write_text(script)
    clusterddp("rehearse", "train.py", "--gpus", 1, code=1, cwd=tmp_path / "writes")
    assert list(outside.iterdir()) == []
