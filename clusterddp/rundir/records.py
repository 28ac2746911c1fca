"""Reads files that hold one JSON object, and retries reads that may succeed a moment later."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from clusterddp.errors import RunDirectoryError
from clusterddp.reporter import say
from clusterddp.rundir.files import open_binary
from clusterddp.rundir.schemas import Schema, schema_error

_T = TypeVar("_T")

#: Errors of a network file system that may disappear on retry, and the pauses before each retry, in seconds.
_TRANSIENT = frozenset((errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO))
_PAUSES_S = (0.05, 0.2, 0.75)
#: The most bytes of a file with one JSON object or a job definition, and in the holes of a file of lines. A sparse file
#: of another user may seem to have terabytes, and would fill the memory of its reader.
LARGEST = 1 << 26


def retrying(path: Path, read: Callable[[], _T]) -> _T:
    """Returns the result of ``read``, which reads ``path``. Transient OSErrors are retried for one second."""
    for pause_s in _PAUSES_S:
        try:
            return read()
        except OSError as error:
            if error.errno not in _TRANSIENT:
                raise
            if pause_s == _PAUSES_S[0]:
                say(f"could not read {path} ({error.strerror}). Retrying")
        time.sleep(pause_s)
    return read()


def read_json(path: Path, schema: Schema | None = None) -> dict[str, Any] | None:
    """The JSON object in ``path``. None if the file does not exist.

    Raises RunDirectoryError if the content is not JSON or does not match the schema.
    """
    try:
        text = retrying(path, lambda: read_record(path))
    except FileNotFoundError:
        return None
    try:
        value: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunDirectoryError(f"{path} is not JSON ({error}). Another program changed it") from error
    if wrong := schema_error(value, schema or {}):
        raise RunDirectoryError(f"{path}: {wrong}. Another program changed it")
    return value


def read_record(path: Path) -> bytes:
    """The content of a file that holds one object. Raises OSError, and RunDirectoryError if it is too large."""
    with open_binary(path, buffered=False) as file:
        if os.fstat(file.fileno()).st_size > LARGEST:
            raise RunDirectoryError(f"{path} is too large to be a record. Another program changed it")
        return file.read()
