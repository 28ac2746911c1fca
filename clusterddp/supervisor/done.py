"""What shows that a run is done: the job key ``done``, a file or a line of the ranks' output.

The supervisor looks before an attempt, which is not started if the mark is there, and after it.
"""

from __future__ import annotations

import glob
import re
from pathlib import Path

from clusterddp.jobdef.job import Done, Job
from clusterddp.rundir.run_directory import RunDirectory


def file_pattern(done: Done, run: RunDirectory | None) -> str | None:
    """The pattern of the file, with the run directory in place of its placeholder; None if the mark is none."""
    if done.file is None:
        return None
    return done.file if run is None else done.file.replace("{run_dir}", glob.escape(str(run.path.absolute())))


def found(run: RunDirectory, job: Job) -> str | None:
    """What shows that the run is done, as a sentence; None if nothing does, or its job has no mark.

    A line counts if it is in the output of the newest attempt that started its ranks, a file whatever wrote it.
    """
    if job.done is None:
        return None
    if (pattern := file_pattern(job.done, run)) is not None:
        first = first_match(pattern)
        return None if first is None else f"{first} exists"
    numbers = [number for number in run.attempts() if run.attempt_logs(number).joinpath("rank-0.out").exists()]
    if job.done.log is None or not numbers:
        return None
    logs = run.attempt_logs(numbers[-1])
    files = [logs / f"rank-{rank}.{kind}" for rank in range(job.world_size) for kind in ("out", "err")]
    expression = re.compile(job.done.log)
    name = next((file.name for file in files if _has(file, expression)), None)
    return None if name is None else f"a line of {name} matches {job.done.log!r}"


def first_match(pattern: str) -> str | None:
    """A file that matches a pattern, which may be absolute; None if there is none."""
    return min(glob.glob(pattern, recursive=True), default=None)  # noqa: PTH207


def missing(done: Done) -> str:
    """What exit code 0 without the mark lacks, for a message."""
    what = f"there is no file {done.file}" if done.file else f"no line of the ranks' output matches {done.log!r}"
    return f"{what}, which `done` requires"


def _has(file: Path, expression: re.Pattern[str]) -> bool:
    """Whether a line of a file matches. A carriage return ends a line, too, as of a progress bar."""
    try:
        with open(file, encoding="utf-8", errors="replace", newline=None) as lines:
            return any(expression.search(line.rstrip("\n")) for line in lines)
    except FileNotFoundError:
        return False
