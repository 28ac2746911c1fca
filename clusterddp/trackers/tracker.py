"""What clusterddp needs to know of a tracker. Each module of this folder that has one calls it ``TRACKER``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from clusterddp.keys.kinds import Kind
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.trackers.delivery import Sent


class Sender(Protocol):
    """The connection to a tracker, in the process that sends a run's metrics to it."""

    first: int
    """The first step that it takes."""

    def add(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """Takes the values of a step that were logged ``at`` that time."""
        ...

    def flush(self, step: int | None) -> Sent:
        """Shows them. ``step``: all below it were added. Returns what the tracker has for certain."""
        ...

    def close(self, step: int, clean: bool) -> Sent:
        """Ends it, once everything below ``step`` is safe."""
        ...


@dataclass(frozen=True)
class Tracked:
    """What a tracker's pages show of a run."""

    name: str
    """That of the run directory."""
    job_name: str
    config: Mapping[str, Any]
    """The fields by which runs can be filtered."""


class Tracker(ABC):
    """One tracker."""

    key: ClassVar[str]
    """Its key in a job definition, which is also the name of its folder, its package and its extra."""
    name: ClassVar[str]
    """Its name in messages."""
    kind: ClassVar[Kind]
    """The values of the key. A run without the key has None, or False."""
    meaning: ClassVar[str]
    """What the key means."""
    files: ClassVar[str]
    """What its folder in the run directory holds."""
    live: ClassVar[bool] = False
    """Whether it takes the lines of all steps at once, because it discards those that a later attempt repeats. Others
    only take steps below a checkpoint, because they cannot replace the values of a step."""
    variables_of_script: ClassVar[tuple[str, ...]] = ()
    """Environment variables that belong to a run which the script itself starts in the tracker."""

    def options(self, config: Any, run: Tracked, environ: Mapping[str, str]) -> Mapping[str, Any] | None:  # noqa: ARG002
        """What ``open`` needs, as JSON has it. None: the environment disables the tracker."""
        return {}

    def variables(self, run: RunDirectory, rank: int, environ: Mapping[str, str]) -> Mapping[str, str]:  # noqa: ARG002
        """Environment variables with which a rank's script continues the run that it started itself in the tracker in
        earlier attempts."""
        return {}

    @abstractmethod
    def open(self, folder: Path, sent: Sent, options: Mapping[str, Any]) -> Sender:
        """Connects to it. ``sent``: what it has, with the present attempt. Only this imports its package."""

    def described(self, folder: Path, sent: Sent) -> str:  # noqa: ARG002
        """How to look at it, for ``status``."""
        return f"run {sent.id}"
