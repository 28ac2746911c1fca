"""The run's metrics: one JSON line per finished step, appended by rank 0."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from clusterddp.rundir import create_file, drop_torn_line, fsync_directory, write_atomically


class Metrics:
    """The end of ``metrics.jsonl``. Each line is handed to the system at once; the writer makes them durable.

    A full disk does not stop the training: the lines are kept, and written as soon as there is space again.
    """

    def __init__(self, path: Path, attempt: int) -> None:
        drop_torn_line(path)
        self._path, self._attempt = path, attempt
        self._file = self._open()
        if os.fstat(self._file).st_size == 0:
            fsync_directory(path.parent)
        self._pending = b""
        self._failing = self._doubtful = False

    def write(self, step: int, values: dict[str, Any]) -> dict[str, Any]:
        """Appends the line of a finished step and returns it. Tensors of one element become floats or ints."""
        line: dict[str, Any] = {"step": step, "time": time.time(), "attempt": self._attempt}
        line.update({name: plain(value) for name, value in values.items()})
        self._pending += (json.dumps(line) + "\n").encode()
        try:
            self.flush()
            self._failing = False
        except OSError as error:
            if not self._failing:
                print(f"clusterddp: metrics of step {step} are held back: {error.strerror}", file=sys.stderr)
            self._failing = True
        return line

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
        os.close(self._file)


def plain(value: Any) -> Any:
    """A value as JSON has it: a tensor as its number, and nan and the infinities as text that float() reads."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def check(name: str, value: Any) -> None:
    """Raises TypeError for a value that ``plain`` and JSON have no form for. Waits for no device."""
    size = value.numel() if hasattr(value, "numel") else getattr(value, "size", 1)
    try:
        if size != 1:
            raise TypeError(f"a {type(value).__name__} of {size} elements")
        if not hasattr(value, "item"):
            json.dumps(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"run.log({name}=...): expected a number or a tensor of one element, got {error}") from None
