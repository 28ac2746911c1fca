"""The completion marker that the job key ``done`` names: a file, or a line of the ranks' output.

The supervisor looks for it before an attempt, which is not started if the marker is there, and after it.
"""

from __future__ import annotations

import glob
import io
import math
import re
from collections.abc import Mapping
from pathlib import Path

from clusterddp.history.beginnings import OwnCheckpointRead, OwnResume
from clusterddp.history.checkpoints import SavedItself
from clusterddp.history.steps import StepsSeen
from clusterddp.history.view import AttemptView, RunView
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.program import fill_pattern, shown_path
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.supervisor.attempt_progress import STEPPED
from clusterddp.supervisor.script_checkpoints import why_incomplete

#: An empty file with one of these suffixes is a save that was cut off. Any other may be an empty mark.
_CHECKPOINTS = frozenset((".pt", ".pth", ".ckpt", ".bin", ".tar", ".safetensors", ".npz", ".pkl"))

#: The most characters of a matching line that are shown.
LONGEST_LINE = 120


def look(run: RunDirectory, job: Job, history: RunView, exited: bool = False) -> tuple[bool, str]:
    """Whether the mark of a job is there, and what was found, as a clause.

    A file counts if it is complete and was written since the first event of the run. A line counts if it is in the
    output of the newest attempt that has started its ranks, and was printed after rank 0's first step. If no step was
    seen, it counts if ``confirms`` says so, or if all ranks have ``exited`` with code 0.
    """
    if job.done is None:
        return False, ""
    if job.done.file is not None:
        return _file(job.done.file, str(run), math.inf if history.began is None else history.began)
    return _line(str(job.done.log), run, job, history, exited)


def confirms(job: Job, attempt: AttemptView) -> bool:
    """Whether the mark shows that the run is done. A line in the output of an attempt does only if the attempt made a
    step or saved, or began from a checkpoint of this run. Some scripts print it because they find an old result."""
    if job.done is None or job.done.file is not None or not job.see_steps:
        return job.done is not None
    read, resume = attempt.last(OwnCheckpointRead), attempt.last(OwnResume)
    resumed = read is not None and resume is not None and read.file == resume.file
    return resumed or attempt.has(*STEPPED, SavedItself)


def _file(named: str, run_dir: str, since: float) -> tuple[bool, str]:
    found = f"there is no file {shown_path(named, run_dir)}"
    for path in sorted(glob.glob(fill_pattern(named, run_dir), recursive=True)):  # noqa: PTH207
        if (why := _why_not(Path(path), since)) is None:
            return True, f"{shown_path(path, run_dir)} exists"
        found = f"{shown_path(path, run_dir)} does not count ({why})"
    return False, found


def _why_not(path: Path, since: float) -> str | None:
    try:
        if path.stat().st_mtime < since:
            return "it is older than this run"
        empty = not path.is_dir() and path.stat().st_size == 0
    except OSError as error:  # removed meanwhile, or a dangling link
        return error.strerror or str(error)
    return None if empty and path.suffix not in _CHECKPOINTS else why_incomplete(str(path))


def _line(expression: str, run: RunDirectory, job: Job, history: RunView, exited: bool) -> tuple[bool, str]:
    started = [number for number in run.attempts() if (run.attempt_logs(number) / "rank-0.out").exists()]
    none = f"no line of the ranks' output matches '{expression}'"
    if not started:
        return False, none
    logs, pattern = run.attempt_logs(started[-1]), re.compile(expression)
    attempt = history.attempt(started[-1])
    seen = attempt.last(StepsSeen) or StepsSeen()
    first = {"out": seen.out or 0, "err": seen.err or 0}
    early = _printed(logs, 0, pattern, {kind: slice(0, size) for kind, size in first.items()})
    # What the other ranks printed before it is unknown. If the expression matches early, theirs may be early, too.
    everywhere = [dict.fromkeys(first, slice(0, None))] * (0 if early else job.world_size - 1)
    parts = [{kind: slice(size, None) for kind, size in first.items()}, *everywhere]
    found = next(filter(None, (_printed(logs, rank, pattern, part) for rank, part in enumerate(parts))), None)
    if not found and not early:
        return False, none
    if found and (exited or confirms(job, attempt)):
        return True, found
    return False, f"{found or early} before its first step, so this line does not count"


def _printed(logs: Path, rank: int, pattern: re.Pattern[str], parts: Mapping[str, slice]) -> str | None:
    """The first line of a rank that matches, as a clause. ``parts``: where to look in its output, in bytes."""
    for kind, part in parts.items():
        if (line := _matching(logs / f"rank-{rank}.{kind}", pattern, part)) is not None:
            return f"rank {rank} printed '{line}'"
    return None


def _matching(file: Path, pattern: re.Pattern[str], part: slice) -> str | None:
    """The first line that matches, shortened. A carriage return ends a line, too, as of a progress bar."""
    try:
        with open(file, "rb") as opened:
            opened.seek(part.start)
            data = opened if part.stop is None else io.BytesIO(opened.read(part.stop - part.start))
            lines = io.TextIOWrapper(data, encoding="utf-8", errors="replace")
            found = next((line.strip() for line in lines if pattern.search(line.rstrip("\n"))), None)
    except FileNotFoundError:
        return None
    return found if found is None or len(found) <= LONGEST_LINE else f"{found[:LONGEST_LINE]}..."
