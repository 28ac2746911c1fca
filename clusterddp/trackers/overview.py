"""What ``status`` says of a run's trackers: how to look at them, and what they lack."""

from __future__ import annotations

import shlex
from pathlib import Path

from clusterddp.errors import RunDirectoryError
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.trackers.sent import Sent, read_sent


def overview(run: RunDirectory) -> list[tuple[str, str]]:
    """A name and words for each tracker that has something of the run."""
    found = []
    for name, described in _DESCRIBED.items():
        folder = run.path / name
        try:
            sent = read_sent(folder)
        except (OSError, RunDirectoryError):  # another user's, or changed by another program
            continue
        if sent is not None:
            found.append((name, described(folder, sent) + _lacking(sent)))
    return found


def _tensorboard(folder: Path, _: Sent) -> str:
    return f"look at it with: tensorboard --logdir {shlex.quote(str(folder))}"


def _wandb(folder: Path, sent: Sent) -> str:
    if sent.mode == "offline":
        return f"offline; upload it with: wandb sync {shlex.quote(str(folder))}/offline-run-*-{sent.id}"
    return f"run {sent.id}"


def _mlflow(_: Path, sent: Sent) -> str:
    return f"run {sent.id}"


def _lacking(sent: Sent) -> str:
    return f"; it lacks steps from {sent.step} on: {sent.problem}" if sent.problem else ""


_DESCRIBED = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
