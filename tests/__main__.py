"""``python -m tests``: all tests, as ``make test`` runs them; the exit code says whether they pass.

Tests on the cluster take longer but mostly wait: the others run beside them, and are shown when both are done. That
keeps two CPUs busier than any user's, and now and then a test does not find in time what it waits for. So those that
fail, if they are few, are run once more with nothing beside. Their first failure is shown all the same, and named again
at the end, for somebody to look at.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

#: More failures than these are no accident.
FEW = 4


@dataclass
class Half:
    """The tests that a ``-m`` expression selects; ``memory``: pytest's own, of what failed."""

    select: str
    memory: Path

    def command(self, *options: str) -> list[str]:
        return [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            self.select,
            "-o",
            f"cache_dir={self.memory}",
            "--durations=15",
            *options,
        ]

    def failed(self) -> list[str]:
        """The tests that failed when it was last run."""
        try:
            return sorted(json.loads((self.memory / "v/cache/lastfailed").read_text()))
        except FileNotFoundError:
            return []


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        return run(Half("slurm", Path(folder, "slurm")), Half("not slurm", Path(folder, "others")), Path(folder, "log"))


def run(on_cluster: Half, others: Half, log: Path) -> int:
    """Both halves side by side, then what failed."""
    with log.open("w") as said:
        beside = subprocess.Popen(["nice", "-n", "5", *others.command()], stdout=said, stderr=subprocess.STDOUT)
        codes = {on_cluster.select: subprocess.call(on_cluster.command()), others.select: beside.wait()}
    print(log.read_text(), flush=True)
    failed = on_cluster.failed() + others.failed()
    if not any(codes.values()):
        return 0
    if not failed or len(failed) > FEW or set(codes.values()) - {0, 1}:  # 1: tests failed; more: pytest itself did
        return 1
    print(f"\nonce more, with nothing beside: {', '.join(failed)}\n", flush=True)
    again = [half.failed() and subprocess.call(half.command("--last-failed")) for half in (on_cluster, others)]
    verdict = "failed again" if any(again) else "passed only at the second try"
    print(f"\n{verdict}: {', '.join(failed)}", flush=True)
    return int(any(again))


if __name__ == "__main__":
    sys.exit(main())
