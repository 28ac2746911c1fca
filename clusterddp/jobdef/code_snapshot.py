"""The snapshot of the code that a submission takes, to keep edits of the checkout out of queued and requeued runs.

``RUN/code/HASH`` has the layout of the script's repository. HASH is of the copied files, so an unchanged
submission reuses the snapshot. A file is copied, as a reflink where the file system can, and never hard-linked, because
an editor that rewrites it in place would change both. What is not code is linked: paths relative to a script's file
then lead to the same data as in the checkout. ``RUN/code/current.json`` names the snapshot of the newest submission.

``Checkout`` is the script's git repository: its state, the files that a snapshot copies, and those that it links to.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import re
import secrets
import shutil
import stat
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clusterddp.errors import RunDirectoryError, UsageError
from clusterddp.history.beginnings import Started
from clusterddp.history.view import RunView
from clusterddp.jobdef.job import Job, one_line
from clusterddp.process import PACKAGE_FOLDER
from clusterddp.reporter import counted, show
from clusterddp.rundir.files import create_folder, file_mode, fsync_directory, fsync_file_system, remove, write_json
from clusterddp.rundir.records import read_json
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.schemas import Schema, is_count, is_text, optional

#: The maximum size of a snapshot, in bytes, unless the job definition sets another one.
MOST_BYTES = 100_000_000
#: The least size of a small file, a link or a folder, because a repository of many small files is large, too.
BLOCK = 4096
#: Seconds that git may take to list the files of a repository.
GIT_S = 60.0
#: Variables that point git to a repository other than that of the current folder.
_REDIRECTS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR", "GIT_NAMESPACE")


@dataclass(frozen=True)
class Checkout:
    """A repository as a snapshot takes it. ``root`` is a real path. The names are relative to it."""

    root: Path
    copied: tuple[str, ...]
    """Tracked files that exist, and untracked ones that git does not ignore."""
    linked: tuple[str, ...]
    """All other files: ignored ones, run directories, and untracked ``.env`` files, which may hold secrets."""
    commit: str | None
    changes: str | None
    """A hash of the uncommitted changes. None: there are none."""
    changed: int
    """The number of files that differ from the commit, untracked ones included."""


class _GitFailed(Exception):
    """Git is not installed, refuses the repository, or takes too long."""


def checkout_of(job: Job, runs: Iterable[Path], source: Path | None = None) -> Checkout | None:
    """The repository with the job's program, or None if the program is not in one, or git ignores it.

    ``runs``: folders of runs, which are not code. ``source``: the file of a launched function, if there is one. Raises
    UsageError if the snapshot would be too large, or is not possible with ``snapshot: true``.
    """
    program = _program(job, source)
    try:
        found = None if program is None else _read(program, runs)
    except _GitFailed as error:
        if job.snapshot:
            raise UsageError(
                f"could not take a snapshot of the code: {error}. To run without one, use --no-snapshot"
            ) from error
        show(
            f"could not take a snapshot of the code: {error}. Each attempt runs the code that is in the checkout when "
            "it starts"
        )
        return None
    if found is None and job.snapshot:
        where = "the program was not found" if program is None else f"{program} is not in one, or git ignores it"
        raise UsageError(
            f"snapshot: {one_line(job.snapshot)} needs a program in a git repository, but {where}. Use --no-snapshot"
        )
    if found is not None:
        _check_size(found, _bound(job))
    return found


def _program(job: Job, source: Path | None) -> Path | None:
    """The file or folder of the job's code, with a real folder. None for what comes with clusterddp, or is unknown."""
    path = Path(job.script) if job.script else source or _module_file(str(job.module).partition(".")[0])
    if path is None:
        return None
    program = path.parent.resolve() / path.name
    return None if program.is_relative_to(PACKAGE_FOLDER.resolve() / "clusterddp") else program


def _module_file(name: str) -> Path | None:
    """Where ``python -m`` finds a top-level module or package, or None if this interpreter does not find it."""
    with suppress(ImportError, ValueError, OSError):
        here = importlib.machinery.PathFinder.find_spec(name, [str(Path.cwd())])
        spec = here or importlib.util.find_spec(name)
        if spec is not None and (places := [spec.origin] if spec.has_location else spec.submodule_search_locations):
            return next((Path(place) for place in places if place), None)
    return None


def _read(program: Path, runs: Iterable[Path]) -> Checkout | None:
    root = _root(program.parent)
    if root is None:
        return None
    copied, linked = _list(root, _names_below(root, runs, program))
    name = str(program.relative_to(root))
    if name not in copied and not any(other.startswith(f"{name}/") for other in copied):
        return None
    state = repository_state(root)
    changed = set(_names(_git(root, "diff", "--name-only", "-z", "HEAD", "--"))) if state["commit"] else copied
    changed |= copied & set(_names(_git(root, *_OTHERS)))
    return Checkout(root, tuple(sorted(copied)), tuple(sorted(linked)), **state, changed=len(changed))


def _root(folder: Path) -> Path | None:
    """The top of the repository that ``folder`` is in, or for a submodule of the repository around it."""
    if not any(os.path.lexists(parent / ".git") for parent in (folder, *folder.parents)):
        return None
    root = os.fsdecode(_git(folder, "rev-parse", "--show-toplevel").removesuffix(b"\n"))
    while outer := os.fsdecode(_git(Path(root), "rev-parse", "--show-superproject-working-tree").removesuffix(b"\n")):
        root = outer
    return Path(root).resolve()


def _names_below(root: Path, folders: Iterable[Path], program: Path) -> list[str]:
    """The folders that are inside the repository and not around the program, relative to its root."""
    real = [folder.resolve() for folder in folders]
    return [
        str(folder.relative_to(root))
        for folder in real
        if folder != root and folder.is_relative_to(root) and not program.is_relative_to(folder)
    ]


_OTHERS = ("ls-files", "-z", "--others", "--exclude-standard")


def _list(root: Path, runs: Sequence[str] = ()) -> tuple[set[str], set[str]]:
    """The names to copy and to link, of a repository and of those inside it, such as submodules."""
    others = [*_OTHERS, *(f"--exclude=/{_escaped(name)}" for name in runs)]
    untracked = set(_names(_git(root, *others)))
    linked = set(_names(_git(root, *others, "--ignored", "--directory"))) | set(_only_linked(root, untracked))
    copied: set[str] = set()
    for name in (set(_names(_git(root, "ls-files", "-z", "--cached"))) | untracked) - linked:
        kind = _kind(root / name)
        if kind is None or _below_any(name, linked):
            continue
        if not stat.S_ISDIR(kind):
            copied |= {name} if stat.S_ISREG(kind) or stat.S_ISLNK(kind) else set()
        elif (root / name / ".git").exists():
            inner_copied, inner_linked = _list(root / name)
            copied |= {f"{name}/{inner}" for inner in inner_copied}
            linked |= {f"{name}/{inner}" for inner in inner_linked}
    folders = {str(parent) for name in copied for parent in Path(name).parents}
    return copied, {name for name in linked if name not in folders and _is_wanted(root / name)}


def _only_linked(root: Path, untracked: Iterable[str]) -> Iterator[str]:
    """The untracked names that are not copied, with run directories in place of their files."""
    known: dict[Path, bool] = {}
    for name in untracked:
        path = Path(name)
        if path.name == ".env" or path.name.startswith(".env."):
            yield name
        for folder in path.parents:
            if folder not in known:
                known[folder] = (root / folder / "job.yaml").exists() and (root / folder / "private").is_dir()
            if known[folder] and folder != Path():
                yield str(folder)


def _escaped(name: str) -> str:
    """A name as a pattern of .gitignore."""
    return re.sub(r"([][*?!#\\ ])", r"\\\1", name)


def _below_any(name: str, folders: set[str]) -> bool:
    return any(str(parent) in folders for parent in Path(name).parents)


def _is_wanted(path: Path) -> bool:
    """False for Python's caches, which Python writes again beside the copies."""
    return path.name != "__pycache__" and path.suffix != ".pyc" and os.path.lexists(path)


def _kind(path: Path) -> int | None:
    """The mode of a file, or None if it does not exist: deleted, or outside of a sparse checkout."""
    try:
        return path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


def _names(output: bytes) -> list[str]:
    return [os.fsdecode(name).rstrip("/") for name in output.split(b"\0") if name]


def _git(folder: Path, *arguments: str) -> bytes:
    environ = {name: value for name, value in os.environ.items() if name not in _REDIRECTS}
    try:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, env=environ, capture_output=True, timeout=GIT_S, check=True).stdout
    except FileNotFoundError as error:
        raise _GitFailed(f"git is not installed here, and {folder} is in a git repository") from error
    except subprocess.TimeoutExpired as error:
        raise _GitFailed(f"git took more than {GIT_S:.0f} s to list the files of {folder}") from error
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {error.returncode}"]
        advice = next((f" (to trust it: {line.strip()})" for line in lines if "--add safe.directory" in line), "")
        raise _GitFailed(f"git {arguments[0]} failed in {folder}: {lines[0]}{advice}") from error


# --- the size


def _bound(job: Job) -> int:
    if not isinstance(job.snapshot, str):
        return MOST_BYTES
    number, unit = job.snapshot[:-1], job.snapshot[-1]
    return int(number) * {"M": 10**6, "G": 10**9}[unit]


def _check_size(checkout: Checkout, most: int) -> None:
    """Raises UsageError, with the largest files or folders, if a snapshot would take more than ``most`` bytes."""
    sizes = {name: max(BLOCK, _size(checkout.root / name)) for name in checkout.copied}
    total = sum(sizes.values()) + BLOCK * len(checkout.linked)
    if total <= most:
        return
    largest = ", ".join(_largest(sizes))
    raise UsageError(
        f"the snapshot of the code in {checkout.root} would take {_megabytes(total)}, more than {_megabytes(most)}."
        f"{f' The largest: {largest}.' if largest else ''} Add what is not code to .gitignore (the run then uses it "
        f"in the checkout), allow more with --set snapshot={total // 10**6 + 1}M, or use --no-snapshot to run the "
        "code that is in the checkout when each attempt starts"
    )


def _size(path: Path) -> int:
    with suppress(FileNotFoundError):  # an editor's temporary file, for example
        return path.lstat().st_size
    return 0


def _largest(sizes: dict[str, int]) -> list[str]:
    """The three largest folders, each with its size. A file that is most of its folder is named instead."""
    folders: dict[Path, list[str]] = {}
    for name in sizes:
        folders.setdefault(Path(name).parent, []).append(name)
    totals = {folder: sum(sizes[name] for name in names) for folder, names in folders.items()}
    lines = []
    for folder in sorted(totals, key=totals.__getitem__, reverse=True)[:3]:
        if 20 * totals[folder] < sum(totals.values()):
            break
        file = max(folders[folder], key=sizes.__getitem__)
        many = f"{folder}/ ({_megabytes(totals[folder])} in {counted(len(folders[folder]), 'file')})"
        lines.append(f"{file} ({_megabytes(sizes[file])})" if 2 * sizes[file] > totals[folder] else many)
    return lines


def _megabytes(size: int) -> str:
    return f"{size / 10**6:.3g} MB" if size < 10**9 else f"{size / 10**9:.3g} GB"


RECORDED_PACKAGES = ("clusterddp", "torch", "numpy")


def code_state(job: Job, submitted: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The state of the script's folder and the versions. ``commit`` and ``changes`` are None outside a git checkout.

    ``submitted``: of an attempt that uses a snapshot, the state of the repository when it was taken, with its name.
    """
    state = submitted or repository_state(Path(job.script).parent if job.script else Path.cwd())
    return {
        **state,
        "script": _hash_of(Path(job.script)) if job.script else None,
        "python": platform.python_version(),
        **{name: _version(name) for name in RECORDED_PACKAGES},
    }


def repository_state(folder: Path) -> dict[str, str | None]:
    """The commit of the repository that ``folder`` is in, and a hash of its uncommitted changes."""
    commit = _git_text(folder, "rev-parse", "HEAD")
    changes = _git_text(folder, "status", "--porcelain=v1", "-z") if commit else None
    if commit and changes:
        changes += _git_text(folder, "diff", "HEAD") or ""
    return {
        "commit": commit.strip() if commit else None,
        "changes": hashlib.sha256(changes.encode(errors="surrogateescape")).hexdigest()[:12] if changes else None,
    }


def changed_code(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """One entry per difference: ``torch 2.12.0 -> 2.13.0``. Only one of two attempts may have used a snapshot."""
    compared = (name for name in after if name != "snapshot" or name in before)
    return [f"{name} {before.get(name)} -> {after[name]}" for name in compared if before.get(name) != after[name]]


def _git_text(folder: Path, *arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, errors="replace", timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None


def _hash_of(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError:
        return None


def _version(package: str) -> str | None:
    import importlib.metadata  # slow to import, and a report does not need it

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


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
