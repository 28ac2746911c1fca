"""Checkpoints of a run: a file is whole or detectably not, and nobody reads or deletes outside its own lineage.

A checkpoint is ``checkpoints/step-<12 digits>.attempt-<n>.pt``, which plain ``torch.load(weights_only=True)`` reads. It
is written to a temporary sibling, synced, read back, and renamed; the folder is synced; only then are older ones
deleted.
Attempts that were superseded may still write: their number is in the name, and the *lineage* of a later attempt (what
it resumed from, what that one resumed from ...) leaves out what they wrote after they were left behind.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import re
import secrets
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from clusterddp.errors import CheckpointError, Superseded
from clusterddp.rundir import RunDirectory, fsync_directory, read_json, write_json
from clusterddp.training.state import split

FORMAT = 1
_NAME = re.compile(r"step-(\d{12})\.attempt-(\d+)\.pt")
_TEMPORARY = re.compile(r"\.step-\d{12}\.attempt-(\d+)\.pt\.[0-9a-f]+\.tmp")
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint file: the state after ``step`` steps, written by ``attempt``."""

    path: Path
    step: int
    attempt: int


@dataclass(frozen=True)
class Saved:
    """What a save took."""

    checkpoint: Checkpoint
    seconds: float
    bytes: int


class NotSaved(Exception):
    """A save failed for want of space or by an I/O error; what was there before is untouched."""


class Checkpoints:
    """The checkpoints that attempt ``attempt`` of a run may restore, write and delete. Rank 0 alone uses it."""

    def __init__(
        self,
        directory: RunDirectory,
        attempt: int,
        *,
        keep: int = 2,
        on_damaged: Callable[[Checkpoint, str], None] | None = None,
    ) -> None:
        self._directory, self._attempt, self._keep, self._on_damaged = directory, attempt, keep, on_damaged

    def candidates(self) -> list[Checkpoint]:
        """The checkpoints of the lineage, newest first, whole or not."""
        found = sorted(self._visible(), key=lambda checkpoint: -checkpoint.step)
        return [
            checkpoint
            for attempt, highest in lineage(self._directory, self._attempt)
            for checkpoint in found
            if checkpoint.attempt == attempt and checkpoint.step <= highest
        ]

    def restore(self) -> tuple[dict[str, Any], Checkpoint] | None:
        """The newest whole checkpoint's content and place, tensors on the CPU; None when the run has none at all.

        Raises CheckpointError when there are checkpoints and none is whole: a run never starts over by itself.
        """
        candidates = self.candidates()
        reasons = []
        for checkpoint in candidates:
            try:
                return read(checkpoint.path), checkpoint
            except CheckpointError as error:
                if self._on_damaged is not None:
                    self._on_damaged(checkpoint, str(error))
                reasons.append(str(error))
        if not candidates:
            return None
        raise CheckpointError(
            "no checkpoint of the run can be read, and it does not start from step 0 by itself:\n  "
            + "\n  ".join(reasons)
            + f"\nput a good copy into {self._directory.checkpoints}, or begin a new run in another run directory"
        )

    def record_resume(self, parent: tuple[int, int] | None) -> None:
        """Records, before the first step, which checkpoint (attempt, step) this attempt goes on from.

        That puts it into the lineage of later attempts.
        """
        self.check_newest()
        link = None if parent is None else {"attempt": parent[0], "step": parent[1]}
        record = {"attempt": self._attempt, "step": parent[1] if parent else 0, "parent": link}
        write_json(self._directory.resume_record(self._attempt), record, mode=0o600)

    def save(self, step: int, content: Mapping[str, Any]) -> Saved:
        """Commits a checkpoint, then deletes the lineage's older ones, but for the newest ``keep``.

        Raises NotSaved when the disk would not take it, Superseded when a newer attempt of the run exists.
        """
        started = time.monotonic()
        path = self._directory.checkpoints / f"step-{step:012d}.attempt-{self._attempt}.pt"
        self._remove_leftovers()
        try:
            size = self._commit(path, {"format": FORMAT, "attempt": self._attempt, **content})
        except OSError as error:
            raise NotSaved(self._why_not(error, content)) from error
        self._delete_old()
        return Saved(Checkpoint(path, step, self._attempt), time.monotonic() - started, size)

    def check_newest(self) -> None:
        """Raises Superseded when a newer attempt exists: it may be training by now, from an older checkpoint."""
        newest = self._directory.newest_attempt()
        if newest is not None and newest > self._attempt:
            raise Superseded(f"attempt {self._attempt} superseded by attempt {newest}; not writing")

    def _visible(self) -> Iterator[Checkpoint]:
        for path in self._directory.checkpoints.iterdir() if self._directory.checkpoints.exists() else ():
            if match := _NAME.fullmatch(path.name):
                yield Checkpoint(path, int(match[1]), int(match[2]))

    def _commit(self, path: Path, content: Mapping[str, Any]) -> int:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            size = _write(temporary, content)
            _verify(temporary)
            _load(temporary, "the state of the run")
            self.check_newest()
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        fsync_directory(path.parent)
        return size

    def _delete_old(self) -> None:
        for checkpoint in self.candidates()[self._keep :]:
            self.check_newest()
            checkpoint.path.unlink(missing_ok=True)

    def _remove_leftovers(self) -> None:
        """Removes what killed attempts of the lineage left half written: it would fill the disk in the end."""
        own = {attempt for attempt, _ in lineage(self._directory, self._attempt)}
        for path in self._directory.checkpoints.iterdir():
            match = _TEMPORARY.fullmatch(path.name)
            if match and int(match[1]) in own:
                self.check_newest()
                path.unlink(missing_ok=True)

    def _why_not(self, error: OSError, content: Mapping[str, Any]) -> str:
        needed, free = _size(content), shutil.disk_usage(self._directory.checkpoints).free
        kept = next((f"keeping step {checkpoint.step}" for checkpoint in self.candidates()), "no older one to keep")
        return f"checkpoint needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} free ({error.strerror}); {kept}"


def lineage(directory: RunDirectory, attempt: int) -> Iterator[tuple[int, float]]:
    """The attempts whose checkpoints count for ``attempt``, newest first, each with its highest step that counts.

    It follows the resume records. Attempts without one never took a step: the walk to the first record passes them by.
    """
    highest = float("inf")
    while attempt >= 0:
        record = read_json(directory.resume_record(attempt))
        if record is None and highest == float("inf"):
            attempt -= 1
            continue
        yield attempt, highest
        parent = record["parent"] if record else None
        if parent is None:
            return
        attempt, highest = parent["attempt"], min(highest, parent["step"])


def read(path: Path) -> dict[str, Any]:
    """A checkpoint's content, every byte of it verified. Raises CheckpointError when it is not whole."""
    try:
        _verify(path)
    except OSError as error:
        raise CheckpointError(f"{path.name} is damaged: {error.strerror or error}") from error
    content = _load(path, path.name)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path.name} is not a checkpoint of this version (format {FORMAT})")
    return content


def _verify(path: Path) -> None:
    """Reads every byte and compares the check sums; raises OSError when one differs or the file is cut off."""
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                _check_sum(archive, name)
    except (zipfile.BadZipFile, EOFError, RuntimeError, NotImplementedError) as error:
        raise OSError(errno.EIO, _first_line(error)) from error


def _load(source: Path | io.BytesIO, name: str) -> Any:
    mmap = isinstance(source, Path)
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except (RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{name} cannot be loaded with weights_only=True: {_cause(error)}") from error


def check_loadable(state: Mapping[str, Any]) -> None:
    """Raises CheckpointError when a later ``read`` of this state would be refused. Tensors cost nothing here."""
    for name, part in state.items():
        buffer = io.BytesIO()
        torch.save(split(part)[0], buffer)
        buffer.seek(0)
        _load(buffer, f"the state of {name!r}")


def _check_sum(archive: zipfile.ZipFile, name: str) -> None:
    """Reads a member to its end, where zipfile compares the CRC."""
    with archive.open(name) as member:
        while member.read(_CHUNK):
            pass


class _File:
    """A file for torch.save that keeps the OSError of a failed write, which torch turns into a RuntimeError."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "xb")
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self._file.flush()

    def sync(self) -> int:
        """Makes what was written durable, and tells the size. A failed fsync is never retried on the same file."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:  # The rest of its buffer found no space either.
            self.error = self.error or error


def _write(path: Path, content: Mapping[str, Any]) -> int:
    file = _File(path)
    try:
        torch.save(dict(content), file)  # type: ignore[arg-type]
        return file.sync()
    except RuntimeError:
        if file.error is not None:
            raise file.error from None
        raise
    finally:
        file.close()


def _size(value: Any) -> int:
    """The bytes of all tensors in a nested state."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, (list, tuple)) else 0


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _cause(error: BaseException) -> str:
    """What torch refused: it is the one line of its long text that names the class."""
    lines = [line.strip() for line in str(error).splitlines() if "WeightsUnpickler error" in line or "GLOBAL" in line]
    return lines[0] if lines else _first_line(error)
