"""The run's metrics: one JSON line per completed step, appended by rank 0."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from clusterddp.reporter import say
from clusterddp.rundir.files import create_file, finite, fsync_directory, write_atomically
from clusterddp.rundir.records import drop_torn_line

#: The most that the values of one step may take in the file. The same holds for an event, sent to the supervisor.
MOST_BYTES = 1_000_000
#: The most that a number takes in a line, with its punctuation.
_NUMBER_BYTES = 32
#: The most metrics that an event lists as not finite.
_MOST_NAMES = 20


class Metrics:
    """Appends to ``metrics.jsonl``. Each line is written immediately; the checkpoint writer makes them durable.

    A full disk does not stop training: the lines are kept, and written as soon as there is space again.
    """

    def __init__(self, path: Path, attempt: int, report: Callable[..., None]) -> None:
        drop_torn_line(path)
        self._path, self._attempt, self._report = path, attempt, report
        self._file = self._open()
        if os.fstat(self._file).st_size == 0:
            fsync_directory(path.parent)
        self._pending = b""
        self._failing = False
        #: Set when fsync failed: the kernel marks lost pages as clean, so that another fsync would not report them. All
        #: lines go into a new file.
        self.doubtful = False
        self._not_finite: set[str] = set()

    def write(self, step: int, values: dict[str, Any]) -> dict[str, Any]:
        """Appends the line of a completed step and returns it. Tensors of one element become floats or ints.

        The first time that a metric is not finite is recorded in the history.
        """
        line: dict[str, Any] = {"step": step, "time": time.time(), "attempt": self._attempt}
        line.update({name: plain(name, value) for name, value in values.items()})
        self._pending += (json.dumps(line) + "\n").encode()
        if new := [name for name in values if isinstance(line[name], str) and name not in self._not_finite]:
            self._not_finite.update(new)
            named = {name: line[name] for name in new[:_MOST_NAMES]}
            self._report("not_finite", step=step, metrics=named, count=len(new))
        try:
            self.flush()
            self._failing = False
        except OSError as error:
            if not self._failing:
                say(f"metrics of step {step} are held back: {error.strerror}")
            self._failing = True
        return line

    def flush(self) -> None:
        """Writes the lines that were held back; raises OSError if that fails."""
        if self.doubtful:
            write_atomically(self._path, self._path.read_bytes())
            doubtful, self._file = self._file, self._open()
            self.doubtful = False
            os.close(doubtful)
        while self._pending:
            written = os.write(self._file, self._pending)
            self._pending = self._pending[written:]

    def _open(self) -> int:
        return create_file(self._path, os.O_WRONLY | os.O_APPEND)

    def close(self) -> None:
        with suppress(OSError):  # a network file system may report a failed write here; the last save has synced
            os.close(self._file)


class Values:
    """The values logged in a step, merged; the last value of each name counts."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._bytes = 0

    def add(self, values: Mapping[str, Any]) -> None:
        """Raises TypeError for a value that is not a number, ValueError for too large values."""
        for name, value in values.items():
            check(name, value)
        size = self._bytes + sum(len(json.dumps(name)) + _NUMBER_BYTES for name in values.keys() - self._values.keys())
        if size > MOST_BYTES:
            names = [f"{name:.60}=..." for name in list(values)[:2]] + ["..."] * (len(values) > 2)
            raise ValueError(
                f"run.log({', '.join(names)}): the values of one step would take {size:,} bytes, and the limit is "
                f"{MOST_BYTES:,}; write them to your own file"
            )
        self._values.update(values)
        self._bytes = size

    def take(self) -> dict[str, Any]:
        """Returns all values, and clears them."""
        values = self._values
        self._values, self._bytes = {}, 0
        return values


def plain(name: str, value: Any) -> Any:
    """The number as an int or float, or as text if it is NaN or infinite. Synchronizes with a tensor's device."""
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, int):
        return number
    try:
        return finite(float(number))  # also numpy's longdouble
    except (TypeError, ValueError) as error:
        raise TypeError(f"run.log({name}=...): expected a number, got {type(value).__name__} ({error})") from error


def check(name: str, value: Any) -> None:
    """Raises TypeError for anything but a number or a tensor of one real number, ValueError for an integer of more than
    64 bits. Does not synchronize with a device."""
    size = value.numel() if hasattr(value, "numel") else getattr(value, "size", 1)
    got = None
    if size != 1:
        got = f"a {type(value).__name__} of {size} elements"
    elif hasattr(value, "item"):
        got = None if _is_real(value) else f"a {type(value).__name__} of {getattr(value, 'dtype', None)}"
    elif not isinstance(value, (int, float)):
        got = f"{value!r:.60} ({type(value).__name__})"
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ValueError(f"run.log({name}=...): expected at most 64 bits, got an integer of {value.bit_length()} bits")
    if got is not None:
        raise TypeError(f"run.log({name}=...): expected a number or a tensor of one element, got {got}")


def _is_real(value: Any) -> bool:
    """Whether the one element of a tensor or array is a real number, by its dtype."""
    if hasattr(value, "is_complex"):
        return not (value.is_complex() or value.is_meta)
    return getattr(getattr(value, "dtype", None), "kind", "f") not in "cSUOMm"
