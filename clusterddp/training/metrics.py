"""The run's metrics: one JSON line per finished step, appended by rank 0."""

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

#: What the values of one step may take in the file. A line of the history, which goes over the link, is no longer.
MOST_BYTES = 1_000_000
#: A number and what surrounds it in a line, at most.
_NUMBER_BYTES = 32
#: How many metrics an event names that are not finite.
_MOST_NAMES = 20


class Metrics:
    """The end of ``metrics.jsonl``. Each line is handed to the system at once; the writer makes them durable.

    A full disk does not stop the training: the lines are kept, and written as soon as there is space again.
    """

    def __init__(self, path: Path, attempt: int, report: Callable[..., None]) -> None:
        drop_torn_line(path)
        self._path, self._attempt, self._report = path, attempt, report
        self._file = self._open()
        if os.fstat(self._file).st_size == 0:
            fsync_directory(path.parent)
        self._pending = b""
        self._failing = self._doubtful = False
        self._not_finite: set[str] = set()

    def write(self, step: int, values: dict[str, Any]) -> dict[str, Any]:
        """Appends the line of a finished step and returns it. Tensors of one element become floats or ints.

        The first time that a metric is not finite is an event of the history.
        """
        line: dict[str, Any] = {"step": step, "time": time.time(), "attempt": self._attempt}
        line.update({name: plain(name, value) for name, value in values.items()})
        self._pending += (json.dumps(line) + "\n").encode()
        self._tell_not_finite(step, {name: line[name] for name in values if isinstance(line[name], str)})
        try:
            self.flush()
            self._failing = False
        except OSError as error:
            if not self._failing:
                say(f"metrics of step {step} are held back: {error.strerror}")
            self._failing = True
        return line

    def _tell_not_finite(self, step: int, values: Mapping[str, str]) -> None:
        new = [name for name in values if name not in self._not_finite]
        if new:
            self._not_finite.update(new)
            named = {name: values[name] for name in new[:_MOST_NAMES]}
            self._report("not_finite", step=step, metrics=named, count=len(new))

    def flush(self) -> None:
        """Hands the lines that were held back to the system; raises OSError when it does not take them."""
        if self._doubtful:
            self._renew()
        while self._pending:
            written = os.write(self._file, self._pending)
            self._pending = self._pending[written:]

    def doubt(self) -> None:
        """To be told when the file could not be synced: the system may hold for written what it has lost, and a sync
        that is repeated says nothing of it. All lines go into a new file."""
        self._doubtful = True

    def _open(self) -> int:
        return create_file(self._path, os.O_WRONLY | os.O_APPEND)

    def _renew(self) -> None:
        write_atomically(self._path, self._path.read_bytes())
        doubtful, self._file = self._file, self._open()
        self._doubtful = False
        os.close(doubtful)

    def close(self) -> None:
        with suppress(OSError):  # a network file system may report a failed write here: the save before has synced
            os.close(self._file)


class Values:
    """The values that are logged in a step, merged; of a name, the last."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._bytes = 0

    def add(self, values: Mapping[str, Any]) -> None:
        """Raises TypeError for a value that is no number, ValueError for one, or for all, that take too much space."""
        for name, value in values.items():
            check(name, value)
        size = self._bytes + sum(len(json.dumps(name)) + _NUMBER_BYTES for name in values.keys() - self._values.keys())
        if size > MOST_BYTES:
            raise ValueError(
                f"run.log({_some(values)}): the values of one step would take {size:,} bytes, and the limit is "
                f"{MOST_BYTES:,}; write them to a file of your own"
            )
        self._values.update(values)
        self._bytes = size

    def take(self) -> dict[str, Any]:
        """All of them; from now on there are none."""
        values = self._values
        self._values, self._bytes = {}, 0
        return values


def plain(name: str, value: Any) -> Any:
    """A number as JSON has it: an int or a float; "NaN" and the infinities are text. Waits for a tensor's device."""
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, int):
        return number
    try:
        return finite(float(number))  # also numpy's longdouble
    except (TypeError, ValueError) as error:
        raise TypeError(f"run.log({name}=...): expected a number, got {type(value).__name__} ({error})") from error


def check(name: str, value: Any) -> None:
    """Raises TypeError unless it is a number or a tensor of one real number, ValueError for an integer of more than 64
    bits. Waits for no device."""
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
    """Whether the one element of a tensor or an array is a real number, as far as its dtype tells."""
    if hasattr(value, "is_complex"):
        return not (value.is_complex() or value.is_meta)
    return getattr(getattr(value, "dtype", None), "kind", "f") not in "cSUOMm"


def _some(values: Mapping[str, Any]) -> str:
    """The first names, as in a call."""
    names = [f"{name:.60}=..." for name in list(values)[:2]]
    return ", ".join([*names, *(["..."] if len(values) > 2 else [])])
