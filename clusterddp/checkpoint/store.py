"""The checkpoint files of a run: which count, which is committed, which are deleted. No torch, and no look inside.

A checkpoint is ``checkpoints/step-<12 digits>.attempt-<n>.safetensors`` (``archive`` has its layout). It is written to
a temporary sibling, read back, synced and renamed; the folder is synced; only then are older ones deleted.
Attempts that were superseded may still write: their number is in the name, and the *lineage* of a later attempt (what
it resumed from, what that one resumed from ...) leaves out what they wrote after they were left behind.
"""

from __future__ import annotations

import errno
import json
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from clusterddp.checkpoint import file_format
from clusterddp.errors import CheckpointError, Superseded
from clusterddp.jobdef.job import Keep
from clusterddp.reporter import say
from clusterddp.rundir.files import fsync_directory, write_json
from clusterddp.rundir.records import METRICS, retrying, schema_error
from clusterddp.rundir.run_directory import RunDirectory

_T = TypeVar("_T")
#: The resume record of an attempt whose records cannot be seen.
_UNKNOWN: Mapping[str, Any] = {}
_NAME = re.compile(r"step-(\d{12})\.attempt-(\d{1,18})\.(safetensors|pt)", re.ASCII)
_TEMPORARY = re.compile(r"\.step-\d{12}\.attempt-(\d+)\.safetensors\.[0-9a-f]+\.tmp")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint file: the state after ``step`` steps, written by ``attempt``."""

    path: Path
    step: int
    attempt: int

    def read(self) -> file_format.Content:
        """Its content, every byte verified. Raises CheckpointError when it is not whole."""
        content = self._checked(file_format.read)
        if content.facts.get("step", str(self.step)) != str(self.step):
            raise CheckpointError(f"{self.path.name} has the state after step {content.facts['step']}: it was renamed")
        return content

    def verify(self) -> None:
        """Raises CheckpointError when it is not whole."""
        self._checked(file_format.verify)

    def _checked(self, read: Callable[[Path], _T]) -> _T:
        if self.path.suffix == ".pt":
            raise CheckpointError(f"{self.path.name} is of format 1, which this version does not read")
        try:
            return retrying(self.path, lambda: read(self.path))
        except file_format.Damaged as error:
            raise CheckpointError(f"{self.path.name} is damaged: {error}") from error
        except OSError as error:
            raise CheckpointError(f"{self.path.name} cannot be read: {error.strerror or error}") from error

    def metric(self, name: str) -> float | None:
        """The value of a metric that was logged in the step before; None when there is none, or no telling."""
        try:
            value = json.loads(file_format.read_facts(self.path)["metrics"])[name]
            return float(value)
        except (file_format.Damaged, OSError, KeyError, ValueError, TypeError, RecursionError):
            return None


class Checkpoints:
    """The checkpoints that attempt ``attempt`` of a run may restore, commit and delete. One process uses it."""

    def __init__(self, directory: RunDirectory, attempt: int, keep: Keep) -> None:
        self._directory, self._attempt, self._keep = directory, attempt, keep
        self.folder = directory.checkpoints

    def candidates(self) -> list[Checkpoint]:
        """The checkpoints of the lineage, newest first, whole or not."""
        found = sorted(visible(self._directory), key=lambda checkpoint: -checkpoint.step)
        return [
            checkpoint
            for attempt, highest in lineage(self._directory, self._attempt)
            for checkpoint in found
            if checkpoint.attempt == attempt and checkpoint.step <= highest
        ]

    def expected(self) -> int | None:
        """The newest step that was committed in the lineage, by the records and the history; None: there was none."""
        highest = dict(lineage(self._directory, self._attempt))
        committed = [int(step) for step in list(highest.values())[1:]]  # those that an attempt resumed from
        for event in self._directory.events():
            step = event.get("step")
            if event["event"] not in ("checkpoint", "forked") or step is None:
                continue
            if not highest or step <= highest.get(event["attempt"], -1):
                committed.append(step)
        return max(committed, default=None)

    def record_resume(self, parent: tuple[int, int] | None) -> None:
        """Records, before the first step, which checkpoint (attempt, step) this attempt goes on from.

        That puts it into the lineage of later attempts.
        """
        self.check_newest()
        link = None if parent is None else {"attempt": parent[0], "step": parent[1]}
        record = {"attempt": self._attempt, "step": parent[1] if parent else 0, "parent": link}
        write_json(self._directory.resume_record(self._attempt), record, mode=0o600)

    def temporary(self, step: int) -> Path:
        """Where to write a checkpoint before it is committed; what killed attempts left half written is removed."""
        self._remove_leftovers()
        return self._path(step).with_name(f".{self._path(step).name}.{secrets.token_hex(4)}.tmp")

    def commit(self, temporary: Path, step: int) -> Checkpoint:
        """Gives a file that is whole and durable its name, durably. ``delete_old`` is to follow.

        Raises Superseded when a newer attempt of the run exists. The file is gone then.
        """
        checkpoint = Checkpoint(self._path(step), step, self._attempt)
        try:
            self.check_newest()
            temporary.rename(checkpoint.path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        try:
            fsync_directory(checkpoint.path.parent)
        except OSError:
            # A crash might still take its name away, and no attempt must have gone on from it then.
            with suppress(OSError):
                checkpoint.path.unlink(missing_ok=True)
            raise
        return checkpoint

    def delete_old(self) -> None:
        """Deletes what ``keep`` does not ask for. Raises Superseded when a newer attempt of the run exists."""
        candidates = self.candidates()
        stay = kept(candidates, self._keep)
        for checkpoint in candidates:
            if checkpoint not in stay:
                self.check_newest()
                try:
                    checkpoint.path.unlink(missing_ok=True)
                except OSError as error:  # The new one is safe all the same, and the next commit tries again.
                    say(f"cannot delete {checkpoint.path.name}: {error.strerror}")

    def check_newest(self) -> None:
        """Raises Superseded when a newer attempt exists: it may be training by now, from an older checkpoint."""
        newest = self._directory.newest_attempt()
        if newest is not None and newest > self._attempt:
            raise Superseded(f"attempt {self._attempt} superseded by attempt {newest}; not writing")

    def why_not(self, error: OSError, needed: int) -> str:
        """Why a checkpoint of ``needed`` bytes was not written, with sizes, and what the run has instead."""
        try:
            free = shutil.disk_usage(self._directory.checkpoints).free
            kept = next((f"keeping step {checkpoint.step}" for checkpoint in self.candidates()), "no older one to keep")
        except OSError as other:
            return f"checkpoint needs {_size(needed)} ({error.strerror}); the others cannot be seen ({other.strerror})"
        full = f", {_size(free)} free" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else ""
        return f"checkpoint needs {_size(needed)}{full} ({error.strerror}); {kept}"

    def _path(self, step: int) -> Path:
        return self._directory.checkpoints / f"step-{step:012d}.attempt-{self._attempt}.safetensors"

    def _remove_leftovers(self) -> None:
        """Removes what killed attempts left half written: it would fill the disk in the end.

        Also of those outside the lineage, such as one that was killed in its first save. One that is alive is
        superseded, and its commit refused.
        """
        for path in self._directory.checkpoints.iterdir():
            match = _TEMPORARY.fullmatch(path.name)
            if match and int(match[1]) <= self._attempt:
                self.check_newest()
                path.unlink(missing_ok=True)


def visible(directory: RunDirectory) -> Iterator[Checkpoint]:
    """All checkpoints in the folder, of whatever lineage, in no order."""
    folder = directory.checkpoints
    for path in retrying(folder, lambda: list(folder.iterdir()) if folder.exists() else []):
        if match := _NAME.fullmatch(path.name):
            yield Checkpoint(path, int(match[1]), int(match[2]))


def of_run(directory: RunDirectory) -> Checkpoints:
    """The checkpoints that the run has now, as its newest attempt sees them."""
    return Checkpoints(directory, directory.newest_attempt() or 0, Keep())


def choose(directory: RunDirectory, step: int | None) -> Checkpoint:
    """The checkpoint that the run would go on from, or that of ``step`` in its lineage; every byte of it verified.

    Raises CheckpointError with the steps that there are.
    """
    found = of_run(directory).candidates()
    wanted = [checkpoint for checkpoint in found if step in (None, checkpoint.step)]
    for checkpoint in wanted:
        try:
            checkpoint.verify()
            return checkpoint
        except CheckpointError:
            if step is not None or checkpoint is wanted[-1]:
                raise
    what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    steps = ", ".join(str(checkpoint.step) for checkpoint in reversed(found))
    raise CheckpointError(f"{directory} has {what}; it has {f'those of the steps {steps}' if steps else 'none at all'}")


def lineage(directory: RunDirectory, attempt: int) -> Iterator[tuple[int, float]]:
    """The attempts whose checkpoints count for ``attempt``, newest first, each with its highest step that counts.

    It follows the resume records. Attempts without one never took a step: the walk to the first record passes them by.
    Where records are closed to this user, or were not copied with the run, the history says what they said; without
    either, the names of the files say which attempt was the last.
    """
    highest, history = float("inf"), None
    newest = attempt
    while attempt >= 0:
        record = _record(directory, attempt)
        if record == _UNKNOWN:
            history = _told(directory) if history is None else history
            record = history.get(attempt)
        if record is None and highest == float("inf"):
            attempt -= 1
            continue
        yield attempt, highest
        parent = record.get("parent") if record else None
        if parent is None:
            return
        attempt, highest = parent["attempt"], min(highest, parent["step"])
    if named := [checkpoint.attempt for checkpoint in visible(directory) if checkpoint.attempt <= newest]:
        yield max(named), highest


def _record(directory: RunDirectory, attempt: int) -> Mapping[str, Any] | None:
    """An attempt's resume record; None when it made none, ``_UNKNOWN`` when its records cannot be seen."""
    try:
        record = directory.resumed(attempt)
        return record if record or directory.attempt_private(attempt).exists() else _UNKNOWN
    except PermissionError:
        return _UNKNOWN


def _told(directory: RunDirectory) -> dict[int, Mapping[str, Any]]:
    """The attempts' resume records as the history has them."""
    told: dict[int, Mapping[str, Any]] = {}
    for event in directory.events():
        number: int = event["attempt"]
        parent: Any = event.get("parent")
        if event["event"] == "resumed" and schema_error(parent, METRICS) is None and parent["attempt"] < number:
            told[number] = {"parent": parent}
        elif event["event"] in ("training", "forked", "checkpoint"):
            told.setdefault(number, {"parent": None})
    return told


def check_present(checkpoints: Checkpoints) -> None:
    """Raises CheckpointError when the run has committed checkpoints and none is left: it would start from step 0."""
    if not checkpoints.candidates() and (step := checkpoints.expected()) is not None:
        raise CheckpointError(
            f"checkpoint {step} of the run was committed, and {checkpoints.folder} has none of its checkpoints any "
            "more. A run never starts again from step 0 by itself: put the files back, or begin a new run in another "
            "run directory"
        )


def kept(candidates: list[Checkpoint], keep: Keep) -> set[Checkpoint]:
    """Which of the lineage's checkpoints (newest first) stay."""
    stay = set(candidates[: keep.last])
    if keep.every is not None:
        stay |= {checkpoint for checkpoint in candidates if checkpoint.step % keep.every == 0}
    if (best := best_of(candidates, keep)) is not None:
        stay.add(best[0])
    return stay


def best_of(candidates: Iterable[Checkpoint], keep: Keep) -> tuple[Checkpoint, float] | None:
    """The checkpoint with the best value of the metric that ``keep`` names, and the value; the newest of equal ones."""
    if keep.best is None:
        return None
    valued = [(checkpoint, value) for checkpoint in candidates if (value := checkpoint.metric(keep.best)) is not None]
    return min(valued, key=lambda pair: keep.order(pair[1]), default=None)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 / 10 else f"{count / 2**20:.1f} MiB"
