"""Writing files of a run directory: whole or not at all, and with the modes of the folder that they are in."""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: JSON has no form for these numbers: they are written as text, as protobuf's JSON mapping does; float() reads it.
_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def finite(value: Any) -> Any:
    """A JSON value in which floats that are not finite are text: "NaN", "Infinity" or "-Infinity"."""
    if isinstance(value, float) and not math.isfinite(value):
        return _NOT_FINITE[str(float(value))]
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def folder_mode(folder: Path) -> int:
    """A folder's rights, without those to write for others: what a folder made in it gets."""
    return stat.S_IMODE(folder.stat().st_mode) & 0o2755 | 0o700


def file_mode(folder: Path) -> int:
    """The rights of a new file in a folder: those may read it who may look into the folder."""
    return folder_mode(folder) & 0o044 | 0o600


def make_inside(path: Path, exist_ok: bool = False) -> None:
    """Makes a folder that is as open as the one around it, whatever the umask. A link in its place is left as it is."""
    path.mkdir(exist_ok=exist_ok)
    mode, status = folder_mode(path.parent), path.lstat()
    own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if own and stat.S_IMODE(status.st_mode) != mode:
        path.chmod(mode)


def create_file(path: str | os.PathLike[str], flags: int) -> int:
    """Opens a file, for ``open(opener=...)``; one that is made now is as open as its folder, whatever the umask."""
    mode = file_mode(Path(path).parent)
    descriptor = os.open(path, flags | os.O_CREAT, mode)
    if os.fstat(descriptor).st_size == 0:
        follow_folder(descriptor, Path(path).parent)
    return descriptor


def follow_folder(descriptor: int, folder: Path) -> None:
    """Makes an open, own file as open as the folder that it is in; without effect on anything else."""
    status = os.fstat(descriptor)
    own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    if own and stat.S_IMODE(status.st_mode) != file_mode(folder):
        os.fchmod(descriptor, file_mode(folder))


def write_atomically(path: Path, content: str | bytes, mode: int | None = None) -> None:
    """Replaces ``path`` by ``content``: a reader, or a crash at any moment, sees the old file or the new one.

    It may be read by those who may look into its folder, unless ``mode`` says otherwise.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    if mode is None:
        descriptor = create_file(temporary, os.O_WRONLY | os.O_EXCL)
    else:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        if isinstance(error, OSError):
            error.filename = str(path)  # a write's error names no file
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def write_json(path: Path, value: Mapping[str, Any], mode: int | None = None) -> None:
    """``write_atomically`` for one JSON object."""
    write_atomically(path, json.dumps(value, indent=1) + "\n", mode)


def append_line(path: Path, value: Mapping[str, Any]) -> None:
    """Appends one JSON object as a line, durably; on an OSError nothing is appended. The caller is the only writer."""
    with open(path, "ab", buffering=0, opener=create_file) as file:
        size = file.seek(0, os.SEEK_END)
        data = (json.dumps(finite(value), allow_nan=False) + "\n").encode()
        try:
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            os.fsync(file.fileno())
            if size == 0:
                fsync_directory(path.parent)
        except OSError:
            file.truncate(size)
            raise


def make_folder(path: Path, exist_ok: bool = True, mode: int = 0o777) -> None:
    """Makes a folder and those above it; all of them are durable. Raises FileExistsError only if told to.

    ``mode`` is that of the last one alone, less the umask.
    """
    if not path.parent.exists():
        make_folder(path.parent)
    path.mkdir(mode=mode, exist_ok=exist_ok)
    fsync_directory(path.parent)


def remove(path: Path) -> None:
    """Deletes a file, if it is there, for good: no crash brings it back."""
    path.unlink(missing_ok=True)
    fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
