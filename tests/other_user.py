"""Another user of the same machine, for tests that run as root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: User and group without a name or a home, as in a container that was given a bare user id.
UID = 54321


#: A member of that user's group.
MEMBER = 54322


def run_as_other(*command: object, umask: int = 0o022, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command as the other user, in / and without HOME."""
    return subprocess.run(
        list(map(str, command)), user=UID, umask=umask, **_as_other(environment), capture_output=True, timeout=120
    )


def start_as_other(*command: object, user: int = UID) -> subprocess.Popen[str]:
    """Starts a command as the other user, or as another member of the group."""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(list(map(str, command)), user=user, umask=0o022, **_as_other({}), **pipes)


def _as_other(environment: Mapping[str, str]) -> Any:
    package = str(Path(__file__).resolve().parents[1])
    inherited = {key: value for key, value in os.environ.items() if key in ("PATH", "LD_LIBRARY_PATH")}
    variables = {**inherited, "PYTHONPATH": package, **environment}
    return {"group": UID, "extra_groups": [], "cwd": "/", "env": variables, "stdin": subprocess.DEVNULL, "text": True}
