"""Where a run's code is: replaces the checkout by the snapshot that is its copy. Standard library only."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from clusterddp import protocol


def mapped(path: str, checkout: str, snapshot: str) -> str:
    """The snapshot's copy of a file or folder in the checkout. The path itself if it is elsewhere, or not copied.

    An empty path is the current folder, as on sys.path.
    """
    real, top = Path(path).resolve(), Path(snapshot).resolve()
    if not real.is_relative_to(checkout) or real.is_relative_to(top):  # the run may be in the checkout, too
        return path
    copy = Path(snapshot, real.relative_to(checkout))
    is_copy = copy.exists() and copy.resolve().is_relative_to(top)  # not a link out of it
    return str(copy) if is_copy else path


def mapped_variables(environ: Mapping[str, str], checkout: str, snapshot: str) -> dict[str, str]:
    """The variables of an attempt that uses a snapshot: PYTHONPATH, if it is set, and where the snapshot is."""
    variables: dict[str, str] = {protocol.CODE: snapshot, protocol.CHECKOUT: checkout}
    if entries := environ.get("PYTHONPATH"):
        variables["PYTHONPATH"] = ":".join(mapped(entry, checkout, snapshot) for entry in entries.split(":"))
    return variables


def of_this_attempt(path: str) -> str:
    """``mapped`` in a rank, whose environment has the attempt's snapshot, if it uses one."""
    snapshot = os.environ.get(protocol.CODE)
    return mapped(path, os.environ[protocol.CHECKOUT], snapshot) if snapshot else path


def use_snapshot() -> None:
    """Makes this rank, and the Python processes that multiprocessing starts, import from the snapshot.

    Packages that are installed in editable mode are found on sys.path, or by a finder of setuptools. Python asks that
    finder after sys.path, so the snapshot's folder at the end of sys.path wins.
    """
    if protocol.CODE in os.environ:
        sys.path[:] = map(of_this_attempt, sys.path)
        copies = [(folder, of_this_attempt(folder)) for folder in _folders_of_finders(sys.meta_path)]
        sys.path += [copy for folder, copy in copies if copy not in (folder, *sys.path)]


def _folders_of_finders(finders: list[Any]) -> Iterator[str]:
    """The folders of the packages that setuptools' finders for editable installs find."""
    for finder in finders:
        packages = getattr(sys.modules.get(getattr(finder, "__module__", "")), "MAPPING", None)
        if isinstance(packages, dict):
            yield from (str(Path(path).parent) for path in packages.values() if isinstance(path, str))
