"""The steps that ranks record for ``submit --check-resume``: a file per rank, to which each attempt appends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

#: Of a value or a tensor: its text if it is short, else a hash. Equal for equal contents.
Digest = str
Digests = Mapping[str, Digest]
#: The reason of a stop that the check requests.
STOP_REASON = "resume check"


@dataclass(frozen=True)
class Recording:
    """After how many steps an attempt stops, and where its ranks record them."""

    until: int
    folder: Path

    @classmethod
    def parse(cls, text: str) -> Recording:
        """The inverse of ``str``."""
        until, _, folder = text.partition(":")
        return cls(int(until), Path(folder))

    def __str__(self) -> str:
        return f"{self.until}:{self.folder}"

    def file(self, rank: int) -> Path:
        """The file of one rank."""
        return self.folder / f"rank-{rank}.jsonl"


@dataclass(frozen=True)
class States:
    """States between two steps.

    ``parts``: those of ``ctx.run()``, by the part's name and the names in it. ``others``: those of objects with a state
    that the script has, but did not pass to ``ctx.run()``.
    """

    parts: Mapping[str, Digests] = field(default_factory=dict)
    others: Mapping[str, Digests] = field(default_factory=dict)


@dataclass(frozen=True)
class StepRecord:
    """One step of one rank.

    ``epoch``: of its first sample. None without a loader. ``epoch_steps``: steps per epoch, if known. ``batch``: by the
    place in it. ``variables``: plain values of the script, with its batch in hand, to name what may be the cause of a
    difference. ``before``: only in the first step of an attempt.
    """

    step: int
    epoch: int | None
    epoch_steps: int | None
    batch: Digests
    variables: Digests
    logged: Digests
    after: States
    before: States | None = None

    def to_line(self) -> str:
        """The record as a line of JSON."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: str) -> StepRecord:
        """The inverse of ``to_line``."""
        values: dict[str, Any] = json.loads(line)
        before = values.pop("before")
        return cls(**{**values, "after": States(**values["after"])}, before=States(**before) if before else None)


#: The steps of each rank, in the order in which they were made.
Trial = Mapping[int, list[StepRecord]]


def read_trial(folder: Path) -> Trial:
    """The ranks' records in the folder."""
    files = sorted((int(path.stem.removeprefix("rank-")), path) for path in folder.glob("rank-*.jsonl"))
    return {rank: [StepRecord.from_line(line) for line in path.read_text().splitlines()] for rank, path in files}
