"""The snapshot of the code that a submission takes, to keep edits of the checkout out of queued and requeued runs.

``RUN/code/HASH`` has the layout of the script's repository (``checkout.py``). HASH is of the copied files, so an
unchanged submission reuses the snapshot. A file is copied, as a reflink where the file system can, and never
hard-linked, because an editor that rewrites it in place would change both. What is not code is linked: paths relative
to a script's file then lead to the same data as in the checkout. ``RUN/code/current.json`` names the snapshot of the
newest submission.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clusterddp.errors import RunDirectoryError
from clusterddp.history.beginnings import Started
from clusterddp.history.view import RunView
from clusterddp.jobdef.checkout import Checkout
from clusterddp.reporter import counted
from clusterddp.rundir.files import create_folder, file_mode, fsync_directory, fsync_file_system, remove, write_json
from clusterddp.rundir.records import read_json
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.schemas import Schema, is_count, is_text, optional

_FICLONE = 0x40049409  # linux/fs.h
_CHUNK = 1 << 20
#: The maximum number of names in a message.
_MOST_NAMES = 4


@dataclass(frozen=True)
class Snapshot:
    """The code of a submission: ``RUN/code/<snapshot>``, a copy of the repository in the folder ``checkout``."""

    snapshot: str
    checkout: str
    commit: str | None
    changes: str | None
    """A hash of the uncommitted changes. None: there were none."""
    changed: int
    """The number of files that differed from the commit."""

    def folder(self, run: RunDirectory) -> Path:
        """The folder of the snapshot."""
        return run.code / self.snapshot

    def state(self) -> dict[str, Any]:
        """Its state for the history."""
        return {"commit": self.commit, "changes": self.changes, "snapshot": self.snapshot}

    def words(self) -> str:
        """``commit 1f3a9c21 + 2 changed files, snapshot code/4f1c2a9be0d7``."""
        commit = f"commit {self.commit[:8]}" if self.commit else "no commit"
        changed = f" + {counted(self.changed, 'changed file')}" if self.changed else ""
        return f"{commit}{changed}, snapshot code/{self.snapshot}"


_RECORD: Schema = {
    "snapshot": lambda name: is_text(name) and re.fullmatch(r"[0-9a-f]{12}", name) is not None,
    "checkout": is_text,
    "commit": optional(is_text),
    "changes": optional(is_text),
    "changed": is_count,
}


def current(run: RunDirectory) -> Snapshot | None:
    """The snapshot that the run uses, or None if it uses the checkout."""
    record = read_json(run.code_file, _RECORD)
    return None if record is None else Snapshot(**{key: record.get(key) for key in _RECORD})  # type: ignore[arg-type]


def present(run: RunDirectory) -> Snapshot | None:
    """The same for an attempt that is about to start. Raises RunDirectoryError if its folder was deleted."""
    snapshot = current(run)
    if snapshot is not None and not snapshot.folder(run).is_dir():
        raise RunDirectoryError(
            f"{snapshot.folder(run)}, the snapshot of the code that this run was submitted with, does not exist. "
            f"To take a new one of {snapshot.checkout}, use: clusterddp submit --run-dir {run.quoted}"
        )
    return snapshot


@dataclass(frozen=True)
class Code:
    """The code that a run is to use: a snapshot of ``checkout``, or with None the checkout itself."""

    checkout: Checkout | None
    owner: RunDirectory | None = None
    """The folder whose snapshot the run shares instead, as the members of a sweep do."""


def use(run: RunDirectory, code: Code) -> str | None:
    """Makes the run use the code.

    Returns a message for the user, or None if nothing changed and there is no snapshot, or a shared one.
    """
    if code.owner is not None and (shared := current(code.owner)) is not None:
        _share(run, shared, code.owner)
        return None
    before = current(run)
    if code.checkout is None:
        remove(run.code_file) if before else None
        if before is None or code.owner is not None:
            return None
        return f"code: each attempt uses the checkout as it is when the attempt starts, instead of {before.words()}"
    snapshot = _take(run, code.checkout)
    write_json(run.code_file, asdict(snapshot))
    if before is None or before.snapshot == snapshot.snapshot:
        return f"code: {snapshot.words()}"
    different = _different(before.folder(run), snapshot.folder(run))
    more = f" and {len(different) - _MOST_NAMES} more" if len(different) > _MOST_NAMES else ""
    names = f"{', '.join(different[:_MOST_NAMES])}{more}"
    return f"code: {snapshot.words()}. Changed since the last submission ({before.words()}): {names}"


def _share(run: RunDirectory, snapshot: Snapshot, owner: RunDirectory) -> None:
    create_folder(run.code, exist_ok=True)
    link = run.code / snapshot.snapshot
    if not link.is_dir():
        link.symlink_to(os.path.relpath(snapshot.folder(owner), run.code))
    write_json(run.code_file, asdict(snapshot))


def unused(run: RunDirectory) -> list[Path]:
    """The folders of earlier submissions' snapshots, which `prune` deletes unless the script wrote into them."""
    used = current(run)
    folders = sorted(run.code.iterdir()) if run.code.is_dir() else []
    old = [path for path in folders if _is_folder(path) and (used is None or path.name != used.snapshot)]
    return [path for path in old if path.name.endswith(".tmp") or path.name == _digest(path, _walk(path))]


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


# --- taking one


def _take(run: RunDirectory, checkout: Checkout) -> Snapshot:
    create_folder(run.code, exist_ok=True)
    try:
        name = _digest(checkout.root, checkout.copied)
        if not (run.code / name).is_dir():
            name = _copy(checkout, run.code)
        _link(checkout, run.code / name)
    except OSError as error:  # a full disk, a file that only its owner can read, or a deleted one
        raise RunDirectoryError(
            f"could not copy {error.filename or checkout.root} for the snapshot of the code: {error.strerror}. "
            "To use the code in the checkout, add --no-snapshot"
        ) from error
    return Snapshot(name, str(checkout.root), checkout.commit, checkout.changes, checkout.changed)


def _copy(checkout: Checkout, code: Path) -> str:
    """Copies the files. Returns the digest of the copies, which names their folder: files may change meanwhile."""
    temporary = code / f"{secrets.token_hex(4)}.tmp"
    create_folder(temporary)
    try:
        for name in checkout.copied:
            _make_parents(temporary, name)
            _copy_file(checkout.root / name, temporary / name)
        digest = _digest(temporary, checkout.copied)
        if (code / digest).is_dir():
            shutil.rmtree(temporary)
        else:
            fsync_file_system(temporary)  # syncing each file would take seconds
            temporary.rename(code / digest)
            fsync_directory(code)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return digest


def _make_parents(top: Path, name: str) -> None:
    for parent in reversed(Path(name).parents[:-1]):
        create_folder(top / parent, exist_ok=True)


def _copy_file(source: Path, target: Path) -> None:
    """Copies a file or a symbolic link. The copy is not more readable than the folder of the run or the source."""
    if source.is_symlink():
        target.symlink_to(source.readlink())
        return
    with open(source, "rb") as original, open(target, "xb") as copy:
        status = os.fstat(original.fileno())
        readable = file_mode(target.parent)
        executable = (readable >> 2) & 0o111 if status.st_mode & 0o100 else 0
        os.fchmod(copy.fileno(), (readable | executable) & (status.st_mode | 0o700))
        try:
            fcntl.ioctl(copy.fileno(), _FICLONE, original.fileno())
        except OSError:  # another file system, or one that cannot share blocks
            shutil.copyfileobj(original, copy, _CHUNK)
        copy.flush()
        os.utime(copy.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))


def _link(checkout: Checkout, folder: Path) -> None:
    for name in checkout.linked:
        if not os.path.lexists(folder / name):
            _make_parents(folder, name)
            (folder / name).symlink_to(checkout.root / name)


# --- comparing


def _digest(root: Path, names: Iterable[str]) -> str:
    total = hashlib.sha256()
    for name, content in sorted(_contents(root, names).items()):
        total.update(hashlib.sha256(os.fsencode(name)).digest() + content)
    return total.hexdigest()[:12]


def _contents(root: Path, names: Iterable[str]) -> dict[str, bytes]:
    """A hash of each file's kind and content, or of a symbolic link's target, by name."""
    hashes = {}
    for name in names:
        path = root / name
        if path.is_symlink():
            hashes[name] = hashlib.sha256(b"link " + os.fsencode(path.readlink())).digest()
            continue
        with open(path, "rb") as file:
            content = hashlib.sha256(b"program " if os.fstat(file.fileno()).st_mode & stat.S_IXUSR else b"file ")
            while chunk := file.read(_CHUNK):
                content.update(chunk)
        hashes[name] = content.digest()
    return hashes


def _different(before: Path, after: Path) -> list[str]:
    """The names of files that only one of two snapshots has, or that differ."""
    old, new = (_contents(folder, _walk(folder)) for folder in (before, after))
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


def _walk(folder: Path) -> Iterator[str]:
    """The files in a snapshot, without Python's caches and the links to the checkout."""
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        links = [name for name in folders if Path(parent, name).is_symlink()]
        for path in (Path(parent, name) for name in (*files, *links)):
            name = str(path.relative_to(folder))
            if not (path.is_symlink() and str(path.readlink()).endswith(f"/{name}")):
                yield name


def described(snapshot: Snapshot | None, history: RunView) -> str | None:
    """The code that the run uses, in words: its snapshot, or else the code of its newest attempt. None if unknown."""
    if snapshot is not None:
        return snapshot.words()
    started = history.last(Started)
    if started is None or not started.code.get("commit"):
        return None
    changed = " + uncommitted changes" if started.code.get("changes") else ""
    return f"commit {str(started.code['commit'])[:8]}{changed}, no snapshot"
