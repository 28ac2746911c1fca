"""What a tracker of a run has been sent, and lacks.

``Sent`` is a record in a tracker's folder, from which the next attempt continues. ``Lines`` reads each line of a run
that counts once, while rank 0 appends more.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterddp.rundir.files import open_binary, write_json
from clusterddp.rundir.json_lines import parse
from clusterddp.rundir.metrics_lines import with_floats
from clusterddp.rundir.records import read_json
from clusterddp.rundir.schemas import LOGGED, Schema, is_count, is_text, optional

_SCHEMA: Schema = {
    "step": is_count,
    "attempt": is_count,
    **dict.fromkeys(("id", "mode", "closing", "problem"), optional(is_text)),
}


@dataclass(frozen=True)
class Sent:
    """The values of a run that a tracker has."""

    step: int = 0
    """It has all values below this step, durably."""
    attempt: int = 0
    """The attempt that recorded this."""
    problem: str | None = None
    """Why it does not get more."""
    id: str | None = None
    """W&B's or MLflow's name for the run."""
    mode: str | None = None
    """W&B's: online or offline."""
    closing: str | None = None
    """A folder that W&B has completed, and that is about to be moved beside the others."""

    def lacks_from(self, first_steps: Mapping[int, int]) -> int:
        """The first step that the tracker lacks, or has from an attempt that a later one has replaced."""
        return min([self.step, *(step for attempt, step in first_steps.items() if attempt > self.attempt)])


def read_sent(folder: Path) -> Sent | None:
    """The record of the tracker with this folder. None if there is none. Raises RunDirectoryError."""
    record = read_json(_file(folder), _SCHEMA)
    if record is None:
        return None
    names = {field.name for field in dataclasses.fields(Sent)}
    return Sent(**{name: value for name, value in record.items() if name in names})


def write_sent(folder: Path, sent: Sent) -> None:
    """Records it."""
    write_json(_file(folder), {name: value for name, value in dataclasses.asdict(sent).items() if value is not None})


def _file(folder: Path) -> Path:
    return folder / "sent.json"


Line = dict[str, Any]


class Lines:
    """The lines of a JSON lines file from step ``first`` on for which ``counts``, in the order of the file.

    That is the order of steps, because all lines below a checkpoint are in the file before an attempt resumes from it.
    """

    #: Bytes that are read at a time; more than the longest line.
    block = 1 << 23

    def __init__(self, path: Path, counts: Callable[[Mapping[str, Any]], bool], first: int) -> None:
        self._path, self._counts, self._first = path, counts, first
        self._read_to = 0
        self._unparsed: deque[bytes] = deque()
        self._next: Line | None = None

    def below(self, step: float) -> Iterator[Line]:
        """The lines below ``step`` that were not returned before."""
        while (line := self._peek()) is not None and line["step"] < step:
            self._next = None
            yield with_floats(line)

    def _peek(self) -> Line | None:
        while self._next is None and (self._unparsed or self._read()):
            line, _ = parse(self._unparsed.popleft(), LOGGED)
            if line is not None and line["step"] >= self._first and self._counts(line):
                self._next = line
        return self._next

    def _read(self) -> bool:
        """Reads more whole lines, because the last may still be incomplete. Opens the file each time, because rank 0
        replaces it by a copy after a failed write."""
        try:
            with open_binary(self._path) as file:
                file.seek(self._read_to)
                read = file.read(self.block)
        except FileNotFoundError:
            return False
        whole = read[: read.rfind(b"\n") + 1]
        self._read_to += len(whole)
        self._unparsed.extend(whole.split(b"\n")[:-1])
        return bool(whole)
