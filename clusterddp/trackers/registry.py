"""The trackers: every module of this folder that has a ``TRACKER``. Nothing else names them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules

from clusterddp import trackers
from clusterddp.errors import RunDirectoryError
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.trackers.delivery import read_sent
from clusterddp.trackers.tracker import Tracker

_OTHERS = {"__main__", "delivery", "follower", "registry", "tracker"}
_NAMES = [module.name for module in iter_modules(trackers.__path__) if module.name not in _OTHERS]
_FOUND: list[Tracker] = [import_module(f"clusterddp.trackers.{name}").TRACKER for name in _NAMES]
#: By their keys in a job definition.
TRACKERS: Mapping[str, Tracker] = {tracker.key: tracker for tracker in _FOUND}


def overview(run: RunDirectory) -> list[tuple[str, str]]:
    """A name and words for each tracker that has values of the run."""
    found = []
    for key, tracker in TRACKERS.items():
        folder = run.path / key
        try:
            sent = read_sent(folder)
        except (OSError, RunDirectoryError):  # another user's, or changed by another program
            continue
        if sent is not None:
            lacking = f". It lacks steps from {sent.step} on: {sent.problem}" if sent.problem else ""
            found.append((key, tracker.described(folder, sent) + lacking))
    return found
