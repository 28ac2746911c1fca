"""How much of a run a tracker has: a record in the tracker's folder, and what follows from it for the next attempt."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clusterddp.rundir.files import write_json
from clusterddp.rundir.records import Schema, is_count, is_text, optional, read_json

_SCHEMA: Schema = {
    "step": is_count,
    "attempt": is_count,
    **dict.fromkeys(("id", "mode", "closing", "problem"), optional(is_text)),
}


@dataclass(frozen=True)
class Sent:
    """What a tracker has of a run."""

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
    """What the tracker with this folder has; None if it has nothing. Raises RunDirectoryError."""
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
