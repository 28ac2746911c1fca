"""Rehearses the scripts of known bugs: ``python -m tests.rehearsal.rehearsals [NAME...]`` (``make rehearsals``).

The first finding on each broken script must have the bug's cause, and none may be on the repaired one. A line per
script is printed, and nothing is written outside a temporary folder. ``--quick`` gives a broken script only the
disturbance that shows its bug. The exit code is 1 if a script is judged wrongly.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.rehearsal.known_bugs import KNOWN_BUGS, KnownBug

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Judged:
    """What a rehearsal says about a script. ``code``: its exit code."""

    bug: KnownBug
    broken: bool
    code: int
    certificate: Mapping[str, Any]
    output: str

    @property
    def causes(self) -> list[str]:
        """Of its findings, the worst first. A script that is not repeatable has that one in front."""
        causes = [one["cause"] for one in self.certificate["findings"]]
        return causes if self.certificate["repeatable"] else ["not_repeatable", *causes]

    @property
    def rightly(self) -> bool:
        """Whether the first cause is the bug's, or a repaired script has no finding."""
        return self.causes[:1] == [self.bug.cause] if self.broken else self.causes == []

    @property
    def line(self) -> str:
        """For the terminal."""
        verdict = "ok   " if self.rightly else "WRONG"
        name = f"{self.bug.name}/{'broken' if self.broken else 'repaired'}"
        spent = f"{self.certificate['seconds']:4.0f} s {self.certificate['starts']:3} starts"
        return f"{verdict} {name:<32} {spent}  {', '.join(self.causes)}"


def rehearsed(bug: KnownBug, *, broken: bool, only: str | None = None, ranks: int = 2) -> Judged:
    """Rehearses one of the two scripts, with the disturbances ``only`` or all. The ranks start quickly.

    Raises:
        RuntimeError: it was not rehearsed to the end.
    """
    with tempfile.TemporaryDirectory(prefix="known-bug-") as top:
        scripts = Path(top, "scripts")
        script = bug.write_broken(scripts).rename(scripts / "train.py")
        if not broken:
            script.write_bytes(bug.repaired.read_bytes())
        words = ["rehearse", script.name, "--gpus", str(ranks), "-o", top]
        if only is not None:
            words += ["--only", only]
        if bug.interruption.notice_s is not None:
            words += ["--notice", f"{bug.interruption.notice_s:g}"]
        paths = [str(REPOSITORY / "tests" / "quick_start"), str(REPOSITORY)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-m", "clusterddp", *words]
        done = subprocess.run(command, cwd=scripts, env=environment, capture_output=True, text=True)
        certificate = Path(top, "rehearsal.json")
        output = f"{done.stdout}{done.stderr}"
        if not certificate.exists():
            raise RuntimeError(f"{bug.name}: {output}")
        return Judged(bug, broken, done.returncode, json.loads(certificate.read_text()), output)


def main() -> int:
    """Rehearses the bugs named, or all, two at a time."""
    parser = argparse.ArgumentParser(prog="python -m tests.rehearsal.rehearsals")
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*(bug.name for bug in KNOWN_BUGS), []])
    parser.add_argument("--quick", action="store_true", help="a broken script gets only the disturbance that shows it")
    parser.add_argument("--repaired", action="store_true", help="only the repaired scripts")
    parser.add_argument("--broken", action="store_true", help="only the broken scripts")
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="rehearsals at a time (default: 2)")
    given = parser.parse_args()
    chosen = [bug for bug in KNOWN_BUGS if bug.name in given.names or not given.names]
    kinds = [broken for broken, other in ((True, given.repaired), (False, given.broken)) if not other]
    wrong = 0

    def judge(case: tuple[KnownBug, bool]) -> Judged:
        bug, broken = case
        return rehearsed(bug, broken=broken, only=bug.shown_by if broken and given.quick else None)

    with ThreadPoolExecutor(given.at_once) as pool:
        for judged in pool.map(judge, [(bug, broken) for broken in kinds for bug in chosen]):
            print(judged.line, flush=True)
            if not judged.rightly:
                wrong += 1
                print(judged.output, flush=True)
    print(f"{len(chosen) * len(kinds) - wrong} of {len(chosen) * len(kinds)} scripts are judged rightly")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
