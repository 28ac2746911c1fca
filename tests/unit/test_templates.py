"""The shell scripts in slurm/ have no mistake that shellcheck knows."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FILES = [path.relative_to(REPOSITORY) for path in sorted((REPOSITORY / "slurm").iterdir())]
SCRIPTS = [path for path in FILES if path.suffix != ".py"]


@pytest.mark.parametrize("script", [*SCRIPTS, Path(".ci/run")], ids=str)
def test_shellcheck_finds_nothing(script: Path) -> None:
    """At its strictest level; a missing shellcheck is a failure."""
    assert shutil.which("shellcheck"), "shellcheck not found: apt-get install shellcheck"
    done = subprocess.run(["shellcheck", script], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
