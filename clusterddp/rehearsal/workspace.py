"""The working folder of a run: a fresh copy of the script's repository, or of its folder."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from clusterddp.errors import UsageError
from clusterddp.jobdef.checkout import MOST_BYTES, find_checkout, is_run
from clusterddp.jobdef.job import Job

_SKIPPED = {".git", "__pycache__", ".venv", "venv", "node_modules", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
#: The files of a repository that are code. Without a repository only Python's are, as any other may be output.
_CODE = frozenset(".py .pyx .c .cc .cpp .cu .h .hpp .sh .yaml .yml .toml .cfg .ini .json".split())
#: A certificate is no part of the code that it is about.
CERTIFICATE = "rehearsal.json"


@dataclass(frozen=True)
class Workspace:
    """What is copied. ``root``: of the repository, or the script's folder. ``inside``: the current folder below it.

    ``linked``: what git ignores, such as data sets. It is linked, but only if the kernel refuses writes to it.
    ``in_git``: whether the script is in a repository.
    """

    root: Path
    inside: Path
    copied: tuple[str, ...]
    linked: tuple[str, ...]
    commit: str | None
    in_git: bool

    def digest(self) -> str:
        """A hash of the code: the names and contents of all copied files that count as code."""
        kinds = _CODE if self.in_git else {".py"}
        names = [name for name in self.copied if Path(name).suffix in kinds and Path(name).name != CERTIFICATE]
        whole = hashlib.sha256()
        for name in sorted(names):
            whole.update(os.fsencode(name) + b"\0")
            with suppress(OSError):  # a link to nothing
                whole.update(hashlib.sha256((self.root / name).read_bytes()).digest())
        return whole.hexdigest()[:16]

    def create(self, target: Path, *, link: bool) -> Path:
        """Copies everything to the new folder ``target``, and returns the folder in it that the script starts in."""
        for name in self.copied:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self.root / name, target / name, follow_symlinks=False)
        for name in self.linked if link else ():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).symlink_to(self.root / name)
        (target / self.inside).mkdir(parents=True, exist_ok=True)
        return target / self.inside


def workspace_of(job: Job, *, bounded: bool = True) -> Workspace:
    """The workspace of a job's program: its repository, or else its folder, of which all files are copied.

    Raises UsageError if they are too large to be copied and ``bounded``.
    """
    most = MOST_BYTES if bounded else None
    here = Path.cwd().resolve()
    if (checkout := find_checkout(job)) is not None:
        _names(checkout.root, checkout.copied, most, "Add what is not code to .gitignore")
        inside = here.relative_to(checkout.root) if here.is_relative_to(checkout.root) else Path()
        return Workspace(checkout.root, inside, checkout.copied, checkout.linked, checkout.commit, True)
    root = Path(job.script).resolve().parent if job.script else here  # Python finds a module in the current folder
    names = (str(path.relative_to(root)) for path in _files(root))
    advice = "Move the script to a new folder, or put it under git and ignore what it does not need"
    copied = _names(root, names, most, advice)
    inside = here.relative_to(root) if here.is_relative_to(root) else Path()
    return Workspace(root, inside, copied, (), None, False)


def program_of(job: Job, root: Path) -> list[str]:
    """The job's script, by its path below ``root``, or ``-m`` and its module."""
    return [str(Path(job.script).resolve().relative_to(root))] if job.script else ["-m", str(job.module)]


def _names(root: Path, names: Iterable[str], most: int | None, advice: str) -> tuple[str, ...]:
    """All of them. Raises UsageError, soon, if these files have more than ``most`` bytes."""
    found: list[str] = []
    total = 0
    for name in names:
        found.append(name)
        with suppress(FileNotFoundError):  # an editor's temporary file, for example
            total += (root / name).lstat().st_size
        if most is not None and total > most:
            raise UsageError(
                f"{root} has more than {most // 10**6} MB to copy, and a rehearsal runs the script in copies of "
                f"its folder. {advice}"
            )
    return tuple(found)


def _files(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED and not is_run(Path(folder, name))]
        yield from (Path(folder) / name for name in files if not name.endswith(".pyc"))


def files_in(folder: Path) -> dict[str, int]:
    """The sizes of the files in a folder by their real paths, without Python's caches."""
    return {os.path.realpath(path): path.lstat().st_size for path in _files(folder)}
