"""The run directory: every path of a run, and the only ways to write there.

A file in a run directory is whole or absent, has one writer and reads with standard tools. Files that are replaced are
written to a temporary sibling, synced, renamed, and the folder is synced. Histories are JSON lines, appended by one
process; ``records`` reads them.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from clusterddp.errors import RunDirectoryError
from clusterddp.rundir.files import (
    _NOT_FINITE,
    folder_mode,
    fsync_directory,
    make_folder,
    make_inside,
    write_atomically,
)
from clusterddp.rundir.records import (
    Form,
    fault,
    if_given,
    is_count,
    is_text,
    is_time,
    last_line,
    patiently,
    read_backwards,
    read_json,
    read_lines,
)
from clusterddp.rundir.sharing import make_private, share_tree

_ATTEMPT = re.compile(r"attempt-(\d{1,18})")


EVENT: Form = {
    "time": is_time,
    "attempt": is_count,
    "event": is_text,
    "step": if_given(is_count),
}  # the rest of an event of kind `result` has the script's own names and values
METRICS: Form = {"step": is_count, "attempt": is_count}
_OUTCOME: Form = {"state": is_text, "step": if_given(is_count), "reason": is_text}
_RESUMED: Form = {
    "step": is_count,
    "parent": if_given(lambda parent: isinstance(parent, dict) and fault(parent, METRICS) is None),
}


class RunDirectory:
    """The paths of one run. Its folder is the run's identity; making this object touches nothing."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.job_file = self.path / "job.yaml"
        self.batch_script = self.path / "job.sbatch"
        self.events_file = self.path / "events.jsonl"
        self.metrics_file = self.path / "metrics.jsonl"
        self.outcome_file = self.path / "outcome.json"
        self.checkpoints = self.path / "checkpoints"
        self.logs = self.path / "logs"
        self.private = self.path / "private"
        self.submitted_file = self.private / "submitted.json"
        self.request_file = self.private / "resubmit.json"
        self.loop_file = self.private / "loop.json"
        self._cancel_mark = self.path / "cancelled"

    def __str__(self) -> str:
        return str(self.path)

    def exists(self) -> bool:
        """Whether a run was made here: it has a job definition. RunDirectoryError where this user may not look."""
        try:
            return self.job_file.exists()
        except PermissionError as error:
            raise RunDirectoryError(
                f"{self}: permission denied: its owner can share the run with `--change --set share=group`"
            ) from error

    def create(self, share: str | None = None) -> None:
        """Makes the folders, durably; ``private`` is closed to others. Folders that exist are kept.

        ``share``: "private" (nobody else may look into the run) or "group" (its group may read all but ``private``);
        None leaves the run's own folder as it is. What is made in it later follows, whatever the umask.
        """
        make_folder(self.path, mode=0o777 if share is None else 0o700)  # nobody may put anything there before us
        if share is not None:
            mode = 0o2750 if share == "group" else 0o700
            if folder_mode(self.path) != mode:
                share_tree(self.path, mode, closed=self.private)
            elif stat.S_IMODE(self.path.stat().st_mode) != mode:  # open to writing by others
                self.path.chmod(mode)
        for folder in (self.checkpoints, self.logs):
            make_inside(folder, exist_ok=True)
        make_private(self.private)
        fsync_directory(self.path)

    # --- attempts

    def attempts(self) -> list[int]:
        """The numbers of all attempts so far, ascending. Each has a folder of logs and one of records."""
        try:
            records = _names_in(self.private)
        except PermissionError:  # another user's run
            records = []
        names = {*_names_in(self.logs), *records}
        return sorted(int(match[1]) for match in map(_ATTEMPT.fullmatch, names) if match)

    def newest_attempt(self) -> int | None:
        """The number of the newest attempt, None before the first."""
        return max(self.attempts(), default=None)

    def superseded(self, attempt: int) -> bool:
        """Whether a newer attempt exists. A folder that cannot be seen for a moment says nothing."""
        newest = self.newest_attempt()
        return newest is not None and newest > attempt

    def create_attempt(self) -> int:
        """Claims the next attempt number; the exclusive mkdir decides between two that try at once."""
        if not self.logs.exists():  # deleted with the logs of earlier attempts
            make_inside(self.logs, exist_ok=True)
            fsync_directory(self.path)
        told = max((event["attempt"] for event in self.events()), default=-1) if not self.attempts() else -1
        while True:
            number = max([told, *self.attempts()]) + 1
            try:
                make_inside(self.attempt_logs(number))
            except FileExistsError:
                continue
            make_private(self.attempt_private(number))
            fsync_directory(self.private)  # the number is taken for good, and the attempt's records have a place
            return number

    def attempt_logs(self, attempt: int) -> Path:
        """The folder of an attempt's rank outputs, ``rank-<r>.out`` and ``rank-<r>.err``."""
        return self.logs / f"attempt-{attempt}"

    def attempt_private(self, attempt: int) -> Path:
        """The folder of an attempt's records: how each rank ended, what was resumed."""
        return self.private / f"attempt-{attempt}"

    def holder_file(self, attempt: int) -> Path:
        """Where an attempt's supervisor says which job or process it is."""
        return self.attempt_private(attempt) / "holder.json"

    def rank_record(self, attempt: int, rank: int) -> Path:
        """Where a rank records its own end."""
        return self.attempt_private(attempt) / f"rank-{rank}.json"

    def resume_record(self, attempt: int) -> Path:
        """Where rank 0 records, before the first step, which checkpoint the attempt goes on from."""
        return self.attempt_private(attempt) / "resumed.json"

    # --- histories

    def events(self) -> list[dict[str, Any]]:
        """The run's history, oldest first."""
        return list(read_lines(self.events_file, EVENT))

    def metrics(self) -> list[dict[str, Any]]:
        """The metrics lines that count, ordered by step; values that are not finite are floats again.

        A line (attempt a, step s) counts if no later attempt resumed at a checkpoint S <= s.
        """
        lines = list(read_lines(self.metrics_file, METRICS))
        floor = self._floors(lines)
        counted = [_with_floats(line) for line in lines if line["step"] < floor(line["attempt"])]
        return sorted(counted, key=lambda line: (line["step"], line["attempt"]))

    def newest_metrics(self) -> dict[str, Any] | None:
        """The last of ``metrics()``, or None; read from the end of the file."""
        floor = self._floors()
        lines = read_backwards(self.metrics_file, METRICS)
        return next((_with_floats(line) for line in lines if line["step"] < floor(line["attempt"])), None)

    def _floors(self, lines: Iterable[Mapping[str, Any]] = ()) -> Callable[[int], float]:
        """For an attempt: the lowest step that any later attempt began at (infinity when there is none).

        Where neither the resume record nor an event says it, the first of the attempt's ``lines`` does.
        """
        begun: dict[int, int] = {}
        for line in lines:
            begun[line["attempt"]] = min(line["step"], begun.get(line["attempt"], line["step"]))
        for event in self.events():
            if event["event"] in ("training", "resumed") and "step" in event:
                begun[event["attempt"]] = event["step"]
        return _lowest_after({**begun, **self._resume_records()})

    def _resume_records(self) -> dict[int, int]:
        """The step that each attempt went on from, where its record may be read: the owner's alone, but surer than the
        event, which the supervisor may not have lived to write."""
        try:
            records = {number: self.resumed(number) for number in self.attempts()}
        except PermissionError:
            return {}
        return {number: record["step"] for number, record in records.items() if record}

    def resumed(self, attempt: int) -> dict[str, Any] | None:
        """An attempt's resume record: "step", and "parent" with "attempt" and "step"; None when it made none."""
        record = read_json(self.resume_record(attempt), _RESUMED)
        if record and record.get("parent") and record["parent"]["attempt"] >= attempt:
            raise RunDirectoryError(f"{self.resume_record(attempt)}: an attempt cannot go on from a later one's state")
        return record

    def last_metrics(self) -> dict[str, Any] | None:
        """The last line of the metrics, whether it counts or not; None before the first."""
        return last_line(self.metrics_file, METRICS)

    def mark_cancelled(self) -> None:
        """Says that nothing may start this run again; to be called before what trains it is ended."""
        write_atomically(self._cancel_mark, "")

    @property
    def cancelled(self) -> bool:
        """Whether ``clusterddp cancel`` was called."""
        return self._cancel_mark.exists()

    def outcome(self) -> dict[str, Any] | None:
        """How the run ended, None while it is not over."""
        outcome = read_json(self.outcome_file, _OUTCOME)
        return outcome and {"step": None, **outcome}


def _names_in(folder: Path) -> list[str]:
    """What is in a folder; nothing where there is none."""
    try:
        return patiently(folder, lambda: os.listdir(folder))
    except FileNotFoundError:
        return []


def _lowest_after(begun: Mapping[int, int]) -> Callable[[int], float]:
    """For an attempt: the lowest of the steps that later attempts began at."""

    def floor(attempt: int) -> float:
        return min((step for later, step in begun.items() if later > attempt), default=float("inf"))

    return floor


_FLOATS = {text: float(text) for pair in _NOT_FINITE.items() for text in pair}  # "nan": as older versions wrote it


def _with_floats(line: dict[str, Any]) -> dict[str, Any]:
    return {name: _FLOATS.get(value, value) if is_text(value) else value for name, value in line.items()}
