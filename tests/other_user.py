"""Another user of the same machine, for tests that run as root."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

#: User and group without a name or a home, as in a container that was given a bare user id.
UID = 54321


def run_as_other(*command: object, umask: int = 0o022, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command as the other user, in / and without HOME."""
    package = str(Path(__file__).resolve().parents[1])
    inherited = {key: value for key, value in os.environ.items() if key in ("PATH", "LD_LIBRARY_PATH")}
    return subprocess.run(
        list(map(str, command)), user=UID, group=UID, extra_groups=[], umask=umask, cwd="/",
        env={**inherited, "PYTHONPATH": package, **environment}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
