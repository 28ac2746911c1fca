"""What the ranks of a run wrote, and its first failure as its supervisor named it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clusterddp.errors import RunDirectoryError
from clusterddp.jobdef.load import load_resolved
from clusterddp.jobdef.secrets import revealed, secret_values
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.supervisor.failure_box import FirstFailure, added_arguments, failure_box
from clusterddp.supervisor.verdict import RankEnd

Event = Mapping[str, Any]
_RECORD = re.compile(r"rank-(\d{1,9})\.json", re.ASCII)


def newest_failure(events: Iterable[Event]) -> Event | None:
    """The event that names the first failure of the newest attempt that had one, or None if no rank failed."""
    found = [event for event in events if event["event"] in ("rank_failed", "hung") and "rank" in event]
    return found[-1] if found else None


def box(run: RunDirectory, event: Event) -> str:
    """The box about a first failure, as the supervisor printed it, but without the failures that followed from it."""
    attempt, rank, host, when = event["attempt"], event["rank"], event.get("host", "?"), event["time"]
    if event["event"] == "hung":
        end = RankEnd(rank, host, "hung", when, error=event.get("what", "hung"))
    else:
        end = RankEnd.read(rank, host, when, run.rank_record(attempt, rank))
        if end.end == "died":  # the supervisor's event has the cause of its death
            end = replace(end, error=event.get("error", end.error))
    secrets = secret_values(revealed(load_resolved(run.job_file), run.job_file), os.environ)
    more = [added_arguments(run, run.events(), attempt)]
    first = FirstFailure(end.without(secrets), step=event.get("step"))
    return failure_box(run, attempt, first, when, secrets, more)


def failed_ranks(run: RunDirectory, attempt: int, events: Iterable[Event]) -> set[int]:
    """The ranks that failed by themselves in an attempt: the first, and those whose own records say so.

    Another user of the group, who cannot read the records, sees only the first.
    """
    failed: set[int] = set()
    for event in events:
        if event["attempt"] == attempt and event["event"] in ("rank_failed", "hung"):
            failed |= {event["rank"], *event.get("late", ())}
    with suppress(FileNotFoundError, PermissionError):
        for match in filter(None, map(_RECORD.fullmatch, os.listdir(run.attempt_private(attempt)))):
            rank = int(match[1])
            if RankEnd.read(rank, "", 0.0, run.rank_record(attempt, rank)).own:
                failed.add(rank)
    return failed


_NAME = re.compile(r"rank-(\d{1,9})\.(out|err)", re.ASCII)
#: Whether to include a rank's logs.
Wanted = Callable[[int], bool]


@dataclass(frozen=True)
class Log:
    """What one rank wrote in one attempt: ``rank-R.out`` (its stdout) and ``rank-R.err`` (its stderr)."""

    folder: Path
    attempt: int
    rank: int

    def path(self, kind: str) -> Path:
        """The file of ``out`` or ``err``."""
        return self.folder / f"rank-{self.rank}.{kind}"


def logs_of(run: RunDirectory, attempt: int, wanted: Wanted) -> list[Log]:
    """The logs of an attempt's ranks, in their order, or none if the attempt has no folder."""
    folder = run.attempt_logs(attempt)
    try:
        found = {int(match[1]) for match in map(_NAME.fullmatch, os.listdir(folder)) if match}
    except FileNotFoundError:
        return []
    return [Log(folder, attempt, rank) for rank in sorted(found) if wanted(rank)]


def find_log(run: RunDirectory, rank: int, attempt: int | None) -> tuple[int, Path]:
    """The attempt (None: the newest) and the file of a rank's stdout. Its stderr is beside it, as ``.err``."""
    number = started(run, run.newest_attempt() if attempt is None else attempt)
    log = Log(run.attempt_logs(number), number, rank)
    if not log.path("out").exists():
        check_not_deleted(run, number)
        raise RunDirectoryError(f"attempt {number} of {run} has no rank {rank}: {log.path('out')} does not exist")
    return number, log.path("out")


def started(run: RunDirectory, attempt: int | None) -> int:
    if attempt is None:
        raise RunDirectoryError(
            f"{run} has not started yet and has no output. See the run's state with: clusterddp status {run.quoted}"
        )
    return attempt


def check_not_deleted(run: RunDirectory, attempt: int) -> None:
    if not run.attempt_logs(attempt).exists():
        raise RunDirectoryError(
            f"the logs of attempt {attempt} of {run} were deleted. A run keeps the logs of its first attempt and "
            "of its newest attempts. The key keep_logs sets how many"
        )
