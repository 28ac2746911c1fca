"""What shows that a run is done: the job key ``done``, a file or a line of the ranks' output.

The supervisor looks before an attempt, which is not started if the mark is there, and after it.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from clusterddp.jobdef.job import Job
from clusterddp.jobdef.placeholders import fill_pattern
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.supervisor.own_checkpoints import why_incomplete

#: A file with one of these names that is empty is a save that was cut off. Any other may be an empty mark.
_CHECKPOINTS = frozenset((".pt", ".pth", ".ckpt", ".bin", ".tar", ".safetensors", ".npz", ".pkl"))

#: The most characters of a matching line that are shown.
LONGEST_LINE = 120


def look(run: RunDirectory, job: Job, events: Iterable[Mapping[str, Any]]) -> tuple[bool, str]:
    """Whether the mark of a job that has one is there, and what was found, as a clause.

    A file counts if it is complete and was written since the run began, by the first of its ``events``. A line counts
    if it is in the output of the newest attempt that has started its ranks.
    """
    if job.done is None:
        return False, ""
    if job.done.file is not None:
        return _file(job.done.file, str(run), min((event["time"] for event in events), default=float("inf")))
    return _line(str(job.done.log), run, job)


def _file(named: str, run_dir: str, since: float) -> tuple[bool, str]:
    found = f"there is no file {named}"
    for path in sorted(glob.glob(fill_pattern(named, run_dir), recursive=True)):  # noqa: PTH207
        if (why := _why_not(Path(path), since)) is None:
            return True, f"{path} exists"
        found = f"{path} does not count: {why}"
    return False, found


def _why_not(path: Path, since: float) -> str | None:
    try:
        if path.stat().st_mtime < since:
            return "it is older than this run"
        empty = not path.is_dir() and path.stat().st_size == 0
    except OSError as error:  # removed meanwhile, or a link to nothing
        return error.strerror or str(error)
    return None if empty and path.suffix not in _CHECKPOINTS else why_incomplete(str(path))


def _line(expression: str, run: RunDirectory, job: Job) -> tuple[bool, str]:
    started = [logs for logs in map(run.attempt_logs, run.attempts()) if (logs / "rank-0.out").exists()]
    pattern = re.compile(expression)
    for logs in started[-1:]:
        for rank in range(job.world_size):
            for name in (f"rank-{rank}.out", f"rank-{rank}.err"):
                if (line := _matching(logs / name, pattern)) is not None:
                    return True, f"a line of {name} matches {expression!r}: {line!r}"
    return False, f"no line of the ranks' output matches {expression!r}"


def _matching(file: Path, pattern: re.Pattern[str]) -> str | None:
    """The first line of a file that matches, shortened. A carriage return ends a line, too, as of a progress bar."""
    try:
        with open(file, encoding="utf-8", errors="replace") as lines:
            found = next((line.strip() for line in lines if pattern.search(line.rstrip("\n"))), None)
    except FileNotFoundError:
        return None
    return found if found is None or len(found) <= LONGEST_LINE else f"{found[:LONGEST_LINE]}..."
