"""The git repository of a job's program: its state, the files that a snapshot copies, and those that it links to."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import re
import stat
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from clusterddp.errors import UsageError
from clusterddp.jobdef.job import Job, one_line
from clusterddp.process import PACKAGE_FOLDER
from clusterddp.reporter import counted, show

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


def find_checkout(job: Job) -> Checkout | None:
    """The same, of any size, and without a message. None also where git does not work."""
    program = _program(job, None)
    with suppress(_GitFailed):
        return None if program is None else _read(program, ())
    return None


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
    # git names a folder whose files are all ignored, and those files, too.
    tops = {name for name in linked if not _below_any(name, linked)}
    return copied, {name for name in tops if name not in folders and _is_wanted(root / name)}


def _only_linked(root: Path, untracked: Iterable[str]) -> Iterator[str]:
    """The untracked names that are not copied, with run directories in place of their files."""
    known: dict[Path, bool] = {}
    for name in untracked:
        path = Path(name)
        if path.name == ".env" or path.name.startswith(".env."):
            yield name
        for folder in path.parents:
            if folder not in known:
                known[folder] = is_run(root / folder)
            if known[folder] and folder != Path():
                yield str(folder)


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run."""
    return (folder / "job.yaml").exists() and (folder / "private").is_dir()


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


def _git_text(folder: Path, *arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, errors="replace", timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None


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
