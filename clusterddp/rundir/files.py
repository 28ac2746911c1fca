"""Writing files in a run directory: durably, completely or not at all, and as readable as the folder they are in.

Other users may be able to rename a folder in a folder of runs, and put their own in its place, with links to anything.
A process therefore opens the folder of its run once (``hold``). From then on all functions here reach the files below
it through that descriptor, wherever the folder is then, and never through its path.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

#: JSON has no such numbers, so they are written as text, as in protobuf's JSON mapping. float() reads it.
_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}

#: Bytes that are copied at a time.
_COPIED = 1 << 24
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


# --- the folder of the run


@dataclass(frozen=True)
class _Held:
    """A folder that this process holds. ``descriptor``: None if it is opened for each use. ``identity``: its device and
    inode."""

    path: str
    descriptor: int | None
    identity: tuple[int, int]


_held: dict[str, _Held] = {}
#: How many folders stay open. A sweep may have thousands of members, and a process often has 1,024 descriptors.
_MOST_OPEN = 64


def hold(folder: Path, follow: bool = True, reopen: bool = True) -> os.stat_result | None:
    """Opens a folder, whose files all functions of this module reach through it from now on. Returns its status.

    None if it does not exist. ``follow``: whether it may be a symbolic link, else NotADirectoryError. ``reopen``:
    whether to open a folder again that this process already holds and that still exists.
    """
    before = _held.get(str(folder))
    if before is not None and not reopen and (found := _unchanged(before)) is not None and found.st_nlink > 0:
        return found
    try:
        descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    except FileNotFoundError:
        return None
    return _keep(str(folder), descriptor)


def hold_open(folder: Path, descriptor: int) -> None:
    """``hold`` for a folder that another process has opened, and whose descriptor this process has inherited."""
    os.set_inheritable(descriptor, False)
    _keep(str(folder), descriptor)


def _keep(path: str, descriptor: int) -> os.stat_result:
    found = os.fstat(descriptor)
    before = _held.get(path)
    others = sum(held.descriptor is not None for held in tuple(_held.values()) if held is not before)
    _held[path] = _Held(path, descriptor if others < _MOST_OPEN else None, _identity(found))
    if before is not None and before.descriptor is not None and _unchanged(before) is not None:
        os.close(before.descriptor)
    if others >= _MOST_OPEN:
        os.close(descriptor)
    return found


def _unchanged(held: _Held) -> os.stat_result | None:
    """The folder's status. None if it is not open, or the script has closed the descriptor, or it is that of something
    else now."""
    with suppress(OSError):
        if held.descriptor is not None and _identity(found := os.fstat(held.descriptor)) == held.identity:
            return found
    return None


def held_descriptor(folder: Path) -> int | None:
    """The descriptor through which this process reaches the folder. None if it does not keep it open."""
    held = _held.get(str(folder))
    return None if held is None or held.descriptor is None else _descriptor(held)


def is_elsewhere(folder: Path) -> bool:
    """Whether a folder that this process holds is no longer at its path. Raises OSError if that is unknown."""
    held = _held.get(str(folder))
    if held is None:
        return False
    try:
        return _identity(folder.stat()) != held.identity
    except (FileNotFoundError, NotADirectoryError):
        return True


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _descriptor(held: _Held) -> int:
    """The folder's descriptor. Opens it again if the script has closed all descriptors, and it is still there."""
    if held.descriptor is not None and _unchanged(held) is not None:
        return held.descriptor
    descriptor = _opened_again(held)
    _held[held.path] = _Held(held.path, descriptor, held.identity)
    return descriptor


def _opened_again(held: _Held) -> int:
    descriptor = os.open(held.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    if _identity(os.fstat(descriptor)) != held.identity:
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "was replaced by another folder", held.path)
    return descriptor


@contextmanager
def at(path: str | os.PathLike[str], new: bool = False) -> Iterator[tuple[str, int | None]]:
    """A path as the functions of ``os`` take it: a name and the descriptor ``dir_fd`` of the held folder that it is
    below, else the path and None. An OSError of the block names the path.

    ``new``: the path of a new folder, which is not that of a held one, even if that had the same path.
    """
    text = os.fspath(path)
    name, descriptor = text, None
    held = _innermost(text.rpartition("/")[0] if new else text)
    if held is not None:
        name = text.removeprefix(held.path).lstrip("/") or "."
        descriptor = _opened_again(held) if held.descriptor is None else _descriptor(held)
    try:
        yield name, descriptor
    except OSError as error:
        if error.filename == name:
            error.filename = text
        raise
    finally:
        if held is not None and held.descriptor is None and descriptor is not None:
            os.close(descriptor)


def _innermost(path: str) -> _Held | None:
    """The held folder that a path is, or is below. A run may be in the folder of a sweep."""
    while path:
        if (held := _held.get(path)) is not None:
            return held
        path = path.rpartition("/")[0]
    return None


# --- modes


def folder_mode(folder: Path) -> int:
    """The mode of a new folder inside ``folder``: that of ``folder``, without write permission for others."""
    return stat.S_IMODE(status(folder).st_mode) & 0o2755 | 0o700


def file_mode(folder: Path) -> int:
    """The mode of a new file inside ``folder``: readable by everyone who may read the folder."""
    return folder_mode(folder) & 0o044 | 0o600


def create_folder(path: Path, exist_ok: bool = False) -> None:
    """Creates a folder as open as its parent. A symbolic link in its place is left unchanged."""
    make_own_folder(path, exist_ok=exist_ok)
    mode = folder_mode(path.parent)
    with at(path) as (name, folder):
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISDIR(found.st_mode) and _differs(found, mode):
            os.chmod(name, mode, dir_fd=folder)


def make_own_folder(path: Path, mode: int = 0o777, exist_ok: bool = False) -> None:
    """``Path.mkdir``."""
    with at(path, new=True) as (name, folder):
        try:
            os.mkdir(name, mode, dir_fd=folder)
        except FileExistsError:
            if not exist_ok or not _is_folder(name, folder):
                raise


def _is_folder(name: str, folder: int | None) -> bool:
    """False for a link that leads nowhere."""
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=folder).st_mode)
    except OSError:
        return False


def create_common_folder(path: Path) -> None:
    """Creates a folder, if there is none, for everyone who may create files in its parent, and holds it.

    As in /tmp, only the owner of a file can delete it. NotADirectoryError if another user has put a link there.
    """
    with suppress(FileExistsError):
        path.mkdir()
        path.chmod(stat.S_IMODE(path.parent.stat().st_mode) & 0o2770 | 0o1700)
    hold(path, follow=False)


def delete_own_file(path: Path) -> bool:
    """Deletes a file of this user. Leaves anything else, such as a link. Returns whether it did."""
    with at(path) as (name, folder):
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
            return False
        os.unlink(name, dir_fd=folder)
        return True


def create_file(path: str | os.PathLike[str], flags: int) -> int:
    """Opens or creates a file, for ``open(opener=...)``. A new one is as readable as its folder. A link is no file."""
    folder = Path(path).parent
    mode = file_mode(folder)
    with at(path) as (name, above):
        descriptor = os.open(name, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=above)
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

    The content goes to a temporary file beside it, which is synced and renamed. Then the folder is synced. Several
    processes may do that at the same time. If it raises, the old file stays.

    ``mode``: of the new file. None makes it as readable as its folder.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    flags = os.O_WRONLY | os.O_EXCL
    descriptor = create_file(temporary, flags) if mode is None else _create(temporary, flags, mode)
    try:
        with open(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        rename(temporary, path)
    except BaseException as error:
        # the OSError of a write has no file name, that of a rename the temporary one
        if isinstance(error, OSError) and str(error.filename) in ("None", str(temporary)):
            error.filename = str(path)
        unlink(temporary)
        raise
    fsync_directory(path.parent)


def _create(path: Path, flags: int, mode: int) -> int:
    with at(path) as (name, folder):
        return os.open(name, flags | os.O_CREAT | os.O_CLOEXEC, mode, dir_fd=folder)


def copy_file(source: Path, target: Path) -> None:
    """Copies a file into a new one, durably but for its name."""
    with open_binary(source) as original, open(target, "xb", opener=create_file) as copy:
        shutil.copyfileobj(original, copy, _COPIED)
        copy.flush()
        os.fsync(copy.fileno())


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
    if not exists(path.parent):
        make_folder(path.parent)
    make_own_folder(path, mode, exist_ok)
    fsync_directory(path.parent)


def remove(path: Path) -> None:
    """Deletes a file durably, if it exists."""
    unlink(path)
    fsync_directory(path.parent)


def unlink(path: Path) -> None:
    """Deletes a file, if it exists. A crash may bring it back."""
    with suppress(FileNotFoundError), at(path) as (name, folder):
        os.unlink(name, dir_fd=folder)


def rename(old: Path, new: Path) -> None:
    """Renames a file, replacing one with the new name."""
    with at(old) as (name, folder), at(new) as (new_name, new_folder):
        os.rename(name, new_name, src_dir_fd=folder, dst_dir_fd=new_folder)


def symlink(path: Path, target: str | os.PathLike[str]) -> None:
    """Creates a symbolic link at ``path`` to ``target``."""
    with at(path) as (name, folder):
        os.symlink(target, name, dir_fd=folder)


def link_target(path: Path) -> Path:
    """The target of a symbolic link."""
    with at(path) as (name, folder):
        return Path(os.readlink(name, dir_fd=folder))


def create_exclusively(path: Path, content: str, mode: int) -> bool:
    """Writes a new file. Returns whether there was none. After an error there is none."""
    try:
        descriptor = _create(path, os.O_WRONLY | os.O_EXCL, mode)
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
    try:
        status(path)
    except OSError as error:  # the errors that are "no" for Path.exists, too
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP):
            return False
        raise
    return True


def status(path: Path) -> os.stat_result:
    """The file's status. FileNotFoundError if there is none."""
    with at(path) as (name, folder):
        return os.stat(name, dir_fd=folder)


def resolved(path: Path) -> str:
    """The path without symbolic links."""
    return str(path.resolve())


def names_in(folder: Path) -> list[str]:
    """The names in a folder."""
    with _opened(folder) as descriptor:
        return os.listdir(descriptor)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    with at(folder) as (name, above):
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=above)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_bytes(path: Path) -> bytes:
    """A file's content."""
    with open_binary(path, buffered=False) as file:
        return file.read()


def read_text(path: Path) -> str:
    """The text of a file in UTF-8, which the user may also give as a pipe."""
    with at(path) as (name, folder):
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    with open(descriptor, encoding="utf-8") as file:
        return file.read()


def open_binary(path: Path, change: bool = False, buffered: bool = True) -> BinaryIO:
    """Opens an existing file to read it, and to ``change`` it. Raises OSError for anything but a file."""
    descriptor = open_file(path, os.O_RDWR | os.O_NOFOLLOW if change else os.O_RDONLY)
    return open(descriptor, "rb+" if change else "rb", buffering=-1 if buffered else 0)


def open_file(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Opens an existing file, also for ``open(opener=...)``. Returns its descriptor.

    Raises OSError for anything but a file, because a pipe may block and a device may never end. A folder of runs may be
    writable by others.
    """
    with at(path) as (name, folder):
        descriptor = os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def fsync_file_system(path: Path) -> None:
    """Makes everything that was written to the file system of ``path`` durable."""
    with _opened(path) as descriptor:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))


def fsync_directory(path: Path) -> None:
    """Makes the creation, renaming and deletion of files in a folder durable."""
    with _opened(path) as descriptor:
        os.fsync(descriptor)
