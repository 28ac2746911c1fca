"""``clusterddp`` as a user calls it, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def clusterddp(
    *words: object, code: int | None = 0, cwd: Path = REPOSITORY, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What it prints. It must end with this exit code; None: with any. ``env``: variables besides those of the test."""
    command = [sys.executable, "-m", "clusterddp", *map(str, words)]
    environment = {**os.environ, **(env or {})}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)
    assert code in (None, done.returncode), done.stderr
    return done
