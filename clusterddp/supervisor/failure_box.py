"""The box about an attempt's first failure, for `submit --local`, the job's log, `logs` and `Handle.result()`."""

from __future__ import annotations

import os
import shlex
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterddp.events import at_step
from clusterddp.failures.stack_traces import different_calls, end_of_log
from clusterddp.jobdef.secrets import masked
from clusterddp.reporter import counted, printable
from clusterddp.rundir.files import open_binary
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.supervisor.limits import SAVED_ITSELF, STEPPED
from clusterddp.supervisor.verdict import RankEnd

#: Events of an attempt that has begun to train, or saved.
_PROGRESS = (*STEPPED, *SAVED_ITSELF)
#: The most other ranks that a box lists.
MOST_OTHERS = 8
#: How many bytes at the end of a rank's log are searched for a stack.
_LOG_BYTES = 1 << 20


def added_arguments(run: RunDirectory, events: Iterable[Mapping[str, Any]], attempt: int) -> str:
    """A line about the arguments that ``resume`` added to an attempt that failed before it made progress, else ''."""
    own = [event for event in events if event["attempt"] == attempt]
    resumed = next((event for event in own if event["event"] == "own_resume"), None)
    if resumed is None or any(event["event"] in _PROGRESS for event in own):
        return ""
    if not resumed.get("arguments"):
        return "" if "file" in resumed else "`resume` added no arguments, because there was no complete checkpoint"
    there = "Check that the script can load it" if (run.path / resumed["file"]).exists() else "It does not exist"
    return f"`resume` added `{shlex.join(resumed['arguments'])}` for {resumed['file']}. {there}"


@dataclass(frozen=True)
class FirstFailure:
    """An attempt's first failure: how its rank ended, and then the others. How many steps were completed, if known."""

    end: RankEnd
    others: Sequence[RankEnd] = ()
    step: int | None = None


def failure_box(
    run: RunDirectory,
    attempt: int,
    first: FirstFailure,
    now: float,
    secrets: Sequence[str] = (),
    then: Sequence[str] = (),
) -> str:
    """The first failure in a box: rank, host, time, its traceback or the end of its log, and the failures it caused.

    ``secrets``: values to mask in the log. ``then``: further lines.
    """
    failure, others = first.end, first.others
    logs = [run.attempt_logs(attempt) / f"rank-{failure.rank}.{kind}" for kind in ("err", "out")]
    log = next((log for log in logs if end_of_file(log).strip()), logs[0])  # some programs report errors on stdout
    body = failure.traceback or end_of_log(masked(end_of_file(log), secrets))
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(min(failure.lost_at, now)))
    lines = [failure.sentence(), f"attempt {attempt}{at_step(first.step)}, {when}", "", *body.rstrip().splitlines(), ""]
    lines += [*_who_waited(failure, others), *_different_calls(failure, others, body)]
    cause = failure.fault or (failure.known.cause if failure.known is not None else "")
    lines += [f"likely cause: {cause}"] if cause else []
    lines += [f"log: {log}", *filter(None, then), *_other_ends(failure, others)]
    wrapped = [
        piece for line in lines for piece in (textwrap.wrap(printable(line), 116, drop_whitespace=False) or [""])
    ]
    rule = "-" * 118
    return "\n".join([f"+{rule}", *(f"| {line}" for line in wrapped), f"+{rule}"])


def end_of_file(log: Path) -> str:
    """The last MiB of a log. Empty if it cannot be read."""
    try:
        with open_binary(log) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _who_waited(failure: RankEnd, others: Sequence[RankEnd]) -> list[str]:
    """The traceback of a rank that waited for one that exited early, as the latter has none."""
    exited = failure.end in ("early", "unfinished")
    waiting = next((end for end in others if end.traceback), None) if exited else None
    return [f"rank {waiting.rank} waited for this rank:", *waiting.traceback.splitlines(), ""] if waiting else []


def _different_calls(failure: RankEnd, others: Sequence[RankEnd], body: str) -> list[str]:
    """Where the ranks were, if they were in different collectives."""
    texts = {failure.rank: body, **{end.rank: end.traceback for end in others}}
    said = different_calls(f"{failure.error}\n{body}", texts)
    return [said, ""] if said else []


def _other_ends(failure: RankEnd, others: Sequence[RankEnd]) -> list[str]:
    """How the other ranks ended, independent failures first."""
    ordered = sorted(others, key=lambda end: (not end.own, end.rank))
    lines = [_other_end(end, failure) for end in ordered[:MOST_OTHERS]]
    if len(ordered) > MOST_OTHERS:
        lines.append(f"as a result: {counted(len(ordered) - MOST_OTHERS, 'more rank')}")
    return ["", *lines] if lines else []


def _other_end(end: RankEnd, failure: RankEnd) -> str:
    """How another rank ended, which the launcher may have killed as the peer of a failed one."""
    if end.own:
        return f"also failed: {end.sentence()}"
    if not end.ended_by_us:
        return f"as a result: {end.sentence()}"
    hung, exited = failure.end.startswith("hung"), failure.end in ("early", "unfinished")
    what = "hung" if hung else "exited" if exited else "failed"
    return f"as a result: rank {end.rank} ({end.host}) was killed by clusterddp after rank {failure.rank} {what}"
