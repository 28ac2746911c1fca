"""Writing files in a run directory: durably, completely or not at all, and as readable as the folder they are in."""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

#: JSON has no such numbers, so they are written as text, as in protobuf's JSON mapping. float() reads it.
_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}

#: For how long a shared disk may hide a new file from other nodes, in seconds (``acdirmax`` of NFS).
HIDDEN_S = 60.0
#: Errors of the run directory that do not come from a file server's outage, so that waiting does not help.
LASTING = frozenset(
    (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)
)


def finite(value: Any) -> Any:
    """A JSON value with "NaN", "Infinity" or "-Infinity" in place of floats that are not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return _NOT_FINITE[str(float(value))]
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def folder_mode(folder: Path) -> int:
    """The mode of a new folder inside ``folder``: that of ``folder``, without write permission for others."""
    return stat.S_IMODE(folder.stat().st_mode) & 0o2755 | 0o700


def file_mode(folder: Path) -> int:
    """The mode of a new file inside ``folder``: readable by everyone who may read the folder."""
    return folder_mode(folder) & 0o044 | 0o600


def create_folder(path: Path, exist_ok: bool = False) -> None:
    """Creates a folder as open as its parent. A symbolic link in its place is left unchanged."""
    path.mkdir(exist_ok=exist_ok)
    mode, status = folder_mode(path.parent), path.lstat()
    if stat.S_ISDIR(status.st_mode) and _differs(status, mode):
        path.chmod(mode)


def create_common_folder(path: Path) -> None:
    """Creates a folder, if there is none, for everyone who may create files in its parent.

    As in /tmp, only the owner of a file can delete it.
    """
    with suppress(FileExistsError):
        path.mkdir()
        path.chmod(stat.S_IMODE(path.parent.stat().st_mode) & 0o2770 | 0o1700)


def create_file(path: str | os.PathLike[str], flags: int) -> int:
    """Opens or creates a file, for ``open(opener=...)``. A new one is as readable as its folder."""
    folder = Path(path).parent
    descriptor = os.open(path, flags | os.O_CREAT, file_mode(folder))
    if os.fstat(descriptor).st_size == 0:
        follow_folder(descriptor, folder)
    return descriptor


def follow_folder(descriptor: int, folder: Path) -> None:
    """Makes an open regular file of this user as readable as its folder. Leaves any other file unchanged."""
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and _differs(status, file_mode(folder)):
        os.fchmod(descriptor, file_mode(folder))


def _differs(status: os.stat_result, mode: int) -> bool:
    """Whether the mode differs, and this user may change it."""
    return status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != mode


def write_atomically(path: Path, content: str | bytes, mode: int | None = None) -> None:
    """Replaces ``path`` by ``content``, durably: a reader, or a crash at any moment, sees the old file or the new one.

    ``mode``: of the new file. None makes it as readable as its folder.
    """
    with replacing(path, mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path, mode: int | None = None) -> Iterator[BinaryIO]:
    """``write_atomically`` for what the block writes. If it raises, the old file stays.

    The content goes to a temporary file beside it, which is synced and renamed. Then the folder is synced. Several
    processes may do that at the same time.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    flags = os.O_WRONLY | os.O_EXCL
    descriptor = create_file(temporary, flags) if mode is None else os.open(temporary, flags | os.O_CREAT, mode)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        # the OSError of a write has no file name, that of a rename the temporary one
        if isinstance(error, OSError) and str(error.filename) in ("None", str(temporary)):
            error.filename = str(path)
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def write_json(path: Path, value: Mapping[str, Any], mode: int | None = None) -> None:
    """``write_atomically`` for one JSON object."""
    write_atomically(path, json.dumps(value, indent=1) + "\n", mode)


def append_line(path: Path, value: Mapping[str, Any]) -> None:
    """Appends one JSON object as a line, durably. An OSError leaves the file as it was. One writer per file."""
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
    """Creates a folder and its parents, durably.

    ``mode``, less the umask, applies to ``path`` alone. Raises FileExistsError if ``path`` is a file, or exists and
    ``exist_ok`` is False.
    """
    if not path.parent.exists():
        make_folder(path.parent)
    path.mkdir(mode=mode, exist_ok=exist_ok)
    fsync_directory(path.parent)


def remove(path: Path) -> None:
    """Deletes a file durably, if it exists."""
    unlink(path)
    fsync_directory(path.parent)


def unlink(path: Path) -> None:
    """Deletes a file, if it exists. A crash may bring it back."""
    path.unlink(missing_ok=True)


def rename(old: Path, new: Path) -> None:
    """Renames a file, replacing one with the new name."""
    old.rename(new)


def create_exclusively(path: Path, content: str, mode: int) -> bool:
    """Writes a new file. Returns whether there was none. After an error there is none."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        return False
    try:
        with open(descriptor, "w") as file:
            file.write(content)
    except OSError as error:
        error.filename = str(path)  # that of a write has no file name
        unlink(path)
        raise
    return True


def exists(path: Path) -> bool:
    """Whether there is a file or a folder. Raises OSError if that is unknown."""
    return path.exists()


def status(path: Path) -> os.stat_result:
    """The file's status. FileNotFoundError if there is none."""
    return path.stat()


def resolved(path: Path) -> str:
    """The path without symbolic links."""
    return str(path.resolve())


def names_in(folder: Path) -> list[str]:
    """The names in a folder."""
    return os.listdir(folder)


def read_bytes(path: Path) -> bytes:
    """A file's content."""
    with open_binary(path, buffered=False) as file:
        return file.read()


def open_binary(path: Path, change: bool = False, buffered: bool = True) -> BinaryIO:
    """Opens an existing file to read it, and to ``change`` it.

    Raises OSError for anything but a file, because a pipe may block and a device may never end. A folder of runs may be
    writable by others.
    """
    descriptor = os.open(path, (os.O_RDWR if change else os.O_RDONLY) | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return open(descriptor, "rb+" if change else "rb", buffering=-1 if buffered else 0)
    os.close(descriptor)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def fsync_file_system(path: Path) -> None:
    """Makes everything that was written to the file system of ``path`` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    finally:
        os.close(descriptor)


def fsync_directory(path: Path) -> None:
    """Makes the creation, renaming and deletion of files in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
