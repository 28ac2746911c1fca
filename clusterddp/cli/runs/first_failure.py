"""The first failure of a run, as its supervisor named it: its event, its box, and who failed by themselves."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from clusterddp.jobdef.load import load_resolved
from clusterddp.jobdef.secrets import revealed, secret_values
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.supervisor.messages import added_arguments, failure_box
from clusterddp.supervisor.verdict import RankEnd

Event = Mapping[str, Any]
_RECORD = re.compile(r"rank-(\d{1,9})\.json", re.ASCII)


def newest_failure(events: Iterable[Event]) -> Event | None:
    """The event that names the first failure of the newest attempt that had one; None if no rank failed."""
    found = [event for event in events if event["event"] in ("rank_failed", "hung") and "rank" in event]
    return found[-1] if found else None


def box(run: RunDirectory, event: Event) -> str:
    """The box about a first failure, as the supervisor printed it, but without the failures that followed from it."""
    attempt, rank, host, when = event["attempt"], event["rank"], event.get("host", "?"), event["time"]
    if event["event"] == "hung":
        end = RankEnd(rank, host, "hung", when, error=event.get("what", "hung"))
    else:
        end = RankEnd.read(rank, host, when, run.rank_record(attempt, rank))
        if end.end == "died":  # the supervisor knows more about how it was killed
            end = replace(end, error=event.get("error", end.error))
    secrets = secret_values(revealed(load_resolved(run.job_file), run.job_file), os.environ)
    more = [added_arguments(run, run.events(), attempt)]
    return failure_box(run, attempt, end.without(secrets), (), event.get("step"), when, secrets, more)


def failed_ranks(run: RunDirectory, attempt: int, events: Iterable[Event]) -> set[int]:
    """The ranks that failed by themselves in an attempt: the first, and those whose own records say so.

    Another user of the group, who cannot read the records, sees the first alone.
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
