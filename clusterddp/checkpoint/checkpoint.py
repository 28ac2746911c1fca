"""A committed checkpoint of a run. Without torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from clusterddp.checkpoint import file_format
from clusterddp.errors import CheckpointError
from clusterddp.rundir.files import status, unlink
from clusterddp.rundir.records import retrying

_T = TypeVar("_T")
#: Names in a checkpoint that are not parts.
RESERVED = {"format", "attempt", "parent", "progress"}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint file: the state after ``step`` steps, written by ``attempt``."""

    path: Path
    step: int
    attempt: int

    def read(self) -> file_format.Content:
        """Reads and verifies the file. Raises CheckpointError if it is damaged, renamed or unreadable."""
        content = self._checked(file_format.read)
        self._check_step(content.facts)
        return content

    def read_head(self) -> file_format.Head:
        """All of the file except its data, verified. Raises CheckpointError as ``read``."""
        head = self._checked(file_format.read_head)
        self._check_step(head.facts)
        return head

    def read_data(self, head: file_format.Head, into: file_format.Into) -> Iterator[int]:
        """``file_format.read_data``. Raises CheckpointError as ``read``."""
        with self.errors():
            yield from file_format.read_data(self.path, head, into, partial(retrying, self.path))

    def _check_step(self, facts: Mapping[str, str]) -> None:
        if facts.get("step", str(self.step)) != str(self.step):
            raise CheckpointError(f"{self.path.name} was renamed. It contains checkpoint {facts['step']}")

    def verify(self) -> None:
        """Reads the file. Raises CheckpointError if it is damaged or unreadable."""
        self._checked(file_format.verify)

    def check_header(self) -> None:
        """Reads the header. Raises CheckpointError if it is damaged, the file is truncated, or either is unreadable."""
        self._checked(file_format.read_facts)

    def _checked(self, read: Callable[[Path], _T]) -> _T:
        if self.path.suffix == ".pt":
            raise CheckpointError(f"{self.path.name} has format 1, which this version cannot read")
        with self.errors():
            return retrying(self.path, lambda: read(self.path))

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Errors of reading the file as CheckpointErrors."""
        try:
            yield
        except file_format.Damaged as error:
            raise CheckpointError(f"{self.path.name} is damaged: {error}") from error
        except OSError as error:
            raise CheckpointError(f"could not read {self.path.name}: {error.strerror or error}") from error

    def facts(self) -> Mapping[str, str]:
        """The metadata, which is not verified. Raises Damaged or OSError."""
        return file_format.read_facts(self.path)

    def metric(self, name: str) -> float | None:
        """The value of a metric at the last step before the checkpoint. None if it is missing or unreadable."""
        try:
            value = json.loads(self.facts()["metrics"])[name]
            return float(value)
        except (file_format.Damaged, OSError, KeyError, ValueError, TypeError, RecursionError):
            return None

    def best_rule(self) -> str | None:
        """The rule for the best checkpoint of the run that wrote it, such as ``f1 max``. None if unknown."""
        try:
            return str(self.facts()["best"])
        except (file_format.Damaged, OSError, KeyError, TypeError, RecursionError):
            return None

    @property
    def files(self) -> list[Path]:
        """All its files, in the order in which they must be deleted. Raises OSError."""
        return [self.path]

    @property
    def size(self) -> int:
        """Bytes on disk. Raises OSError."""
        return status(self.path).st_size

    def delete(self) -> None:
        """Deletes the checkpoint. Raises OSError."""
        unlink(self.path)
