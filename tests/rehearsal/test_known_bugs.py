"""Each known bug does its damage to an interrupted run, and the repaired script ends as if nothing had happened."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rehearsal.known_bugs import BUGS, KNOWN_BUGS, KnownBug

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.product
@pytest.mark.parametrize("bug", [pytest.param(bug, id=bug.name) for bug in KNOWN_BUGS])
def test_an_interruption_damages_the_broken_script_alone(bug: KnownBug, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.rehearsal.plain", str(tmp_path), bug.name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    print(done.stderr)
    assert json.loads(done.stdout) == {"name": bug.name, "broken": bug.damage.value, "repaired": None}


def test_each_folder_is_a_known_bug() -> None:
    assert sorted(bug.name for bug in KNOWN_BUGS) == sorted(path.name for path in BUGS.iterdir() if path.is_dir())


@pytest.mark.parametrize("bug", [pytest.param(bug, id=bug.name) for bug in KNOWN_BUGS])
def test_each_patch_applies_and_scripts_differ_in_the_bug_alone_without_clusterddp(
    bug: KnownBug, tmp_path: Path
) -> None:
    broken, repaired = bug.write_broken(tmp_path / "scripts").read_text(), bug.repaired.read_text()
    compile(broken, "broken.py", "exec")
    changed = [line for line in difflib.ndiff(broken.splitlines(), repaired.splitlines()) if line[0] in "+-"]
    assert 1 <= len(changed) <= 20
    assert "clusterddp" not in broken + repaired
