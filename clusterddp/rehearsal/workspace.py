"""The working folder of a run: a fresh copy of the script's repository, or of its folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from clusterddp.errors import UsageError
from clusterddp.jobdef.checkout import MOST_BYTES, Checkout

_SKIPPED = {".git", "__pycache__", ".venv", "venv", "node_modules", ".mypy_cache", ".pytest_cache", ".ruff_cache"}


@dataclass(frozen=True)
class Workspace:
    """What is copied. ``root``: of the repository, or the script's folder. ``inside``: the current folder below it.

    ``linked``: what git ignores, such as data sets. It is linked, but only if the kernel refuses writes to it.
    """

    root: Path
    inside: Path
    copied: tuple[str, ...]
    linked: tuple[str, ...]
    commit: str | None

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


def workspace_of(folder: Path, checkout: Checkout | None) -> Workspace:
    """The workspace of a script in a repository, or else in ``folder``, of which all files are copied.

    Raises UsageError if that folder is too large.
    """
    here = Path.cwd().resolve()
    if checkout is not None:
        inside = here.relative_to(checkout.root) if here.is_relative_to(checkout.root) else Path()
        return Workspace(checkout.root, inside, checkout.copied, checkout.linked, checkout.commit)
    root = folder.resolve()
    names: list[str] = []
    total = 0
    for path in _files(root):
        total += path.lstat().st_size
        names.append(str(path.relative_to(root)))
        if total > MOST_BYTES:
            raise UsageError(
                f"{root} holds more than {MOST_BYTES // 10**6} MB, and a rehearsal copies the script's folder. Put the "
                "script in a git repository, of which only what git does not ignore is copied, or in a smaller folder"
            )
    inside = here.relative_to(root) if here.is_relative_to(root) else Path()
    return Workspace(root, inside, tuple(names), (), None)


def _files(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        yield from (Path(folder) / name for name in files if not name.endswith(".pyc"))


def files_in(folder: Path) -> dict[str, int]:
    """The sizes of the files in a folder by their real paths, without Python's caches."""
    return {os.path.realpath(path): path.lstat().st_size for path in _files(folder)}
