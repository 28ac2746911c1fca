"""The checkpoint files of a run: which ones count, how one is committed, what deletes one. Without torch.

A checkpoint is ``checkpoints/step-<12 digits>.attempt-<n>.safetensors`` (format: ``file_format.py``), or for a sharded
model a folder (``sharded/folder.py``). The file is written to a temporary one beside it, read back, synced and renamed.
Then the folder is synced, and only then older ones are deleted. A superseded attempt may still write. Its number is in
the file name, and the *lineage* of a later attempt (the checkpoint that it resumed from, the one that this attempt
resumed from, ...) excludes files that it wrote too late.

The class ``Checkpoints`` says what deletes a checkpoint, and what is never deleted.
"""

from __future__ import annotations

import errno
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from clusterddp.checkpoint.checkpoint import Checkpoint
from clusterddp.checkpoint.sharded.folder import NAME, ShardedCheckpoint
from clusterddp.errors import CheckpointError, Superseded
from clusterddp.jobdef.job import Keep
from clusterddp.reporter import say
from clusterddp.rundir.files import HIDDEN_S, exists, fsync_directory, names_in, rename, unlink, write_json
from clusterddp.rundir.records import retrying
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.schemas import METRICS, schema_error

#: Stands for the resume record of an attempt whose records this user cannot read.
_UNKNOWN: Mapping[str, Any] = {}
#: The errors of a full disk, or of a used-up quota.
FULL = (errno.ENOSPC, errno.EDQUOT)
_NAME = re.compile(r"step-(\d{12})\.attempt-(\d{1,18})\.(safetensors|pt)", re.ASCII)
_TEMPORARY = re.compile(r"\.step-(\d{12})\.attempt-(\d+)\.safetensors\.[0-9a-f]+\.tmp")


class Checkpoints:
    """The checkpoints that an attempt of a run may restore, commit and delete. For use by one process.

    Five things delete a file of ``checkpoints/``:

    - After each commit, the writer process calls ``delete_old``. It deletes the checkpoints that ``keep`` of the job
      definition does not match: by default all but the three newest (``keep.last``).
    - On a full disk or a used-up quota, the writer calls ``make_room``, or rank 0 for the metrics and for other ranks
      of a sharded model. It deletes the oldest checkpoint that only ``keep.last`` keeps, but not the two newest.
    - Before each save, ``temporary`` deletes the incomplete files of attempts that were killed. A save that fails
      deletes its own file.
    - ``clusterddp prune`` (``runs/pruning.py``), for a run that is over, keeps the newest checkpoint, or as many as the
      user asks for, and the best one. It deletes all others of the lineage, those of ``keep.every`` included, and
      incomplete files. If the newest is damaged, it deletes none.
    - If Slurm refuses the first job of a new run, or its files cannot be written, its directory is removed, with the
      checkpoint of ``--fork`` in it.

    A run never deletes its newest checkpoint, one that ``keep.every`` or ``keep.best`` matches, or one outside the
    lineage. Once a newer attempt exists, the older one deletes only the file that it is writing, because
    ``check_newest`` raises Superseded before every other deletion. The checkpoints that a script saves by itself are
    not deleted: ``worker/script_saves.py`` lets it replace its file, and removes what a killed rank left of one.
    """

    def __init__(self, directory: RunDirectory, attempt: int, keep: Keep) -> None:
        self._directory, self._attempt, self._keep = directory, attempt, keep
        self.folder = directory.checkpoints

    def candidates(self) -> list[Checkpoint]:
        """The checkpoints of the lineage, newest first, damaged ones included."""
        found = sorted(visible(self._directory), key=lambda checkpoint: -checkpoint.step)
        return [
            checkpoint
            for attempt, highest in lineage(self._directory, self._attempt)
            for checkpoint in found
            if checkpoint.attempt == attempt and checkpoint.step <= highest
        ]

    def await_committed(self, step: int, within_s: float = HIDDEN_S) -> None:
        """Waits so long at most until a shared disk shows the last attempt's checkpoint of this step."""
        deadline = time.monotonic() + within_s
        while not any(found.step == step and found.attempt == self._attempt - 1 for found in self.candidates()):
            if time.monotonic() >= deadline:
                say(f"checkpoint {step} was saved, but is missing from {self.folder}")
                return
            time.sleep(0.5)

    def check_present(self, within_s: float = 0.0) -> None:
        """Raises CheckpointError if all committed checkpoints of the run are missing, as it would start from step 0.

        Waits so long at most until a shared disk shows one. The folder of a sharded model's checkpoint may have been
        created by another node, so that even the node of rank 0 does not see it at once.
        """
        if self.candidates():
            return
        from clusterddp.history import beginnings, checkpoints  # only here, as in _from_history

        highest = dict(lineage(self._directory, self._attempt))
        committed = [int(step) for step in list(highest.values())[1:]]  # an attempt resumed from them
        for event in self._directory.history():
            if not isinstance(event, (checkpoints.Checkpoint, beginnings.Forked)):
                continue
            if not highest or event.step <= highest.get(event.attempt, -1):
                committed.append(event.step)
        deadline = time.monotonic() + within_s
        while committed and not self.candidates():
            if time.monotonic() >= deadline:
                raise CheckpointError(
                    f"checkpoint {max(committed)} of this run was saved, but all checkpoints are missing from "
                    f"{self.folder}. A run never restarts from step 0 on its own. Restore the files, or start a new "
                    "run in a different folder"
                )
            time.sleep(0.5)

    def record_resume(self, parent: tuple[int, int] | None) -> None:
        """Records, before the first step, the checkpoint (attempt, step) that this attempt resumes from.

        This adds the attempt to the lineage of later attempts.
        """
        self.check_newest()
        link = None if parent is None else {"attempt": parent[0], "step": parent[1]}
        record = {"attempt": self._attempt, "step": parent[1] if parent else 0, "parent": link}
        write_json(self._directory.resume_record(self._attempt), record, mode=0o600)

    def temporary(self, step: int) -> Path:
        """The file to write a checkpoint to before it is committed.

        Deletes incomplete files of killed attempts, which would fill the disk. Attempts outside the lineage are
        included, such as one that was killed in its first save. If such an attempt is still alive, it is superseded and
        could not commit.
        """
        self.delete_incomplete()
        return self._path(step).with_name(f".{self._path(step).name}.{secrets.token_hex(4)}.tmp")

    def sharded(self, step: int) -> ShardedCheckpoint:
        """This attempt's checkpoint of a sharded model, which may not exist yet."""
        return ShardedCheckpoint(self._path(step).with_suffix(""), step, self._attempt)

    def delete_incomplete(self, before: int | None = None) -> None:
        """Deletes the incomplete checkpoints of this attempt and earlier ones.

        ``before``: leaves this attempt's of that step and later ones, because other ranks of a sharded model may be
        ahead of this one.
        """
        for found in incomplete(self._directory):
            may_be_written = found.attempt == self._attempt and before is not None and found.step >= before
            if found.attempt <= self._attempt and not may_be_written:
                self.check_newest()
                found.delete()

    def commit(self, temporary: Path, step: int) -> Checkpoint:
        """Gives a complete, synced file its final name, durably. Call ``delete_old`` afterwards.

        Raises Superseded, and deletes the file, if a newer attempt exists.
        """
        checkpoint = Checkpoint(self._path(step), step, self._attempt)
        self.rename(temporary, checkpoint.path)
        return checkpoint

    def rename(self, temporary: Path, path: Path) -> None:
        """Renames a complete, synced file, durably. Raises as ``commit``."""
        try:
            self.check_newest()
            rename(temporary, path)
        except BaseException:
            unlink(temporary)
            raise
        try:
            fsync_directory(path.parent)
        except OSError:
            # A crash could still undo the rename, so no attempt may resume from this file.
            with suppress(OSError):
                unlink(path)
            raise

    def delete_old(self) -> None:
        """Deletes the checkpoints that ``keep`` does not match. Raises Superseded if a newer attempt exists."""
        for checkpoint in self.old():
            self.check_newest()
            try:
                checkpoint.delete()
            except OSError as error:  # the new one is committed; retried after the next
                say(f"could not delete {checkpoint.path.name}: {error.strerror}")

    def make_room(self, needed: int, full: int | None = errno.ENOSPC) -> int | None:
        """Deletes, on a full disk, the oldest checkpoint that only ``keep.last`` keeps, but not the two newest.

        Returns its step. None if there is none, or if all of them would not free ``needed`` bytes. ``full``: the error
        number. The rest of a quota is unknown, and the disk's free space does not show it. Raises Superseded if a newer
        attempt exists, OSError.
        """
        candidates = self.candidates()
        stay = kept(candidates, replace(self._keep, last=2))
        old = [checkpoint for checkpoint in candidates if checkpoint not in stay]
        free = 0 if full == errno.EDQUOT else shutil.disk_usage(self.folder).free
        if not old or free + sum(checkpoint.size for checkpoint in old) < needed:
            return None
        self.check_newest()
        old[-1].delete()
        return old[-1].step

    def old(self) -> list[Checkpoint]:
        """The checkpoints that ``keep`` does not match, newest first."""
        candidates = self.candidates()
        stay = kept(candidates, self._keep)
        return [checkpoint for checkpoint in candidates if checkpoint not in stay]

    def check_newest(self) -> None:
        """Raises Superseded if a newer attempt exists, which may already train from an older checkpoint.

        Only the writer process of rank 0 saves, and it asks this right before each rename and each deletion. The answer
        raises Superseded on rank 0 (``client.CheckpointClient.result``), and in the save of a stop on all ranks
        (``saving.Saver.commit``). If the newer attempt begins between this check and the rename, its lineage leaves the
        file out. The supervisor of a superseded attempt saves nothing itself. It ends its connections
        (``decide._on_superseded``), on which its ranks exit (``rank.exit_if_superseded``). Rank 0's question to the
        supervisor before a save (``ControlChannel.why_not_commit``) is about lost ranks, and says nothing about this.
        """
        if self._directory.superseded(self._attempt):
            newest = self._directory.newest_attempt()
            raise Superseded(f"attempt {self._attempt} was superseded by attempt {newest} and does not write")

    def why_not(self, error: OSError, needed: int) -> str:
        """Why a checkpoint of ``needed`` bytes was not saved, and which one the run keeps."""
        try:
            free = shutil.disk_usage(self._directory.checkpoints).free
            kept = next(
                (f"Keeping step {checkpoint.step}" for checkpoint in self.candidates()), "There is no older checkpoint"
            )
        except OSError as other:
            return (
                f"the checkpoint needs {_size(needed)} ({error.strerror}). Could not list the others ({other.strerror})"
            )
        full = f", {_size(free)} free" if error.errno in (errno.ENOSPC, errno.EFBIG) else ""
        return f"the checkpoint needs {_size(needed)}{full} ({error.strerror}). {kept}"

    def _path(self, step: int) -> Path:
        return self._directory.checkpoints / f"step-{step:012d}.attempt-{self._attempt}.safetensors"


def visible(directory: RunDirectory) -> Iterator[Checkpoint]:
    """All checkpoints in the folder, of any lineage, in no order."""
    folder = directory.checkpoints
    for path in retrying(folder, lambda: _paths_in(folder)):
        if match := _NAME.fullmatch(path.name):
            yield Checkpoint(path, int(match[1]), int(match[2]))
        elif match := NAME.fullmatch(path.name):
            sharded = ShardedCheckpoint(path, int(match[1]), int(match[2]))
            if sharded.is_complete:
                yield sharded


def _paths_in(folder: Path) -> list[Path]:
    """The paths of all files in a folder. Empty if it does not exist."""
    try:
        return [folder / name for name in names_in(folder)]
    except FileNotFoundError:
        return []


def incomplete(directory: RunDirectory) -> Iterator[Checkpoint]:
    """The checkpoints that were being written when their attempt was killed, or still are."""
    for path in _paths_in(directory.checkpoints):
        if match := _TEMPORARY.fullmatch(path.name):
            yield Checkpoint(path, int(match[1]), int(match[2]))
        elif match := NAME.fullmatch(path.name):
            sharded = ShardedCheckpoint(path, int(match[1]), int(match[2]))
            if not sharded.is_complete:
                yield sharded


def of_run(directory: RunDirectory) -> Checkpoints:
    """The checkpoints of a run's newest attempt."""
    return Checkpoints(directory, directory.newest_attempt() or 0, Keep())


def choose(directory: RunDirectory, step: int | Literal["best"] | None, keep: Keep = Keep()) -> Checkpoint:  # noqa: B008
    """The checkpoint that the run would resume from, or the one of ``step`` in its lineage, or its best one, verified.

    ``keep``: of the job definition, for the best. Raises CheckpointError if there is none, with the available steps, or
    if it is damaged.
    """
    found = of_run(directory).candidates()
    if step == "best":
        step = _best_step(directory, found, keep)
    wanted = [checkpoint for checkpoint in found if step in (None, checkpoint.step)]
    for checkpoint in wanted:
        try:
            checkpoint.verify()
            return checkpoint
        except CheckpointError as error:
            if step is not None or checkpoint is wanted[-1]:
                raise
            say(f"{error}. Trying the previous checkpoint")
    if not found:
        raise CheckpointError(f"{directory} has no checkpoint")
    steps = ", ".join(str(checkpoint.step) for checkpoint in reversed(found))
    raise CheckpointError(f"{directory} has no checkpoint of step {step}. Available steps: {steps}")


def _best_step(directory: RunDirectory, found: list[Checkpoint], keep: Keep) -> int:
    keep = with_recorded_best(keep, found)
    if keep.best is None:
        raise CheckpointError(
            f"{directory} keeps no best checkpoint. Name its metric in ctx.run(best=...) or in checkpoint.keep"
        )
    best = best_of(found, keep)
    if best is None:
        from clusterddp.rundir.summary import summarize

        others = sorted(set(summarize(directory).metrics) - {"step", "time", "attempt"})
        logged = ", ".join(others) or "no metrics"
        raise CheckpointError(
            f"{directory} has no checkpoint with a value of {keep.best}. Its script has logged {logged}"
        )
    return best[0].step


def with_recorded_best(keep: Keep, candidates: Iterable[Checkpoint]) -> Keep:
    """The rule of the job definition about the best checkpoint, else that of the script, which is in the files."""
    rules = (rule for checkpoint in candidates if (rule := checkpoint.best_rule()) is not None)
    if keep.best is not None or (rule := next(rules, None)) is None:
        return keep
    metric, _, order = rule.rpartition(" ")
    return replace(keep, best=metric, best_is="min" if order == "min" else "max")


def lineage(directory: RunDirectory, attempt: int) -> Iterator[tuple[int, float]]:
    """The attempts whose checkpoints count for ``attempt``, newest first, each with the highest step that counts.

    Follows the resume records. Attempts without one never made a step, and are skipped until the first record. If
    records cannot be read, or were not copied with the run, the history replaces them. Without either, the newest
    attempt in the file names counts.
    """
    highest, history = float("inf"), None
    newest = attempt
    while attempt >= 0:
        record = _record(directory, attempt)
        if record == _UNKNOWN:
            history = _from_history(directory) if history is None else history
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
    """An attempt's resume record. None if it has none, ``_UNKNOWN`` if its records cannot be read."""
    try:
        record = directory.resumed(attempt)
        return record if record or exists(directory.attempt_private(attempt)) else _UNKNOWN
    except PermissionError:
        return _UNKNOWN


def _from_history(directory: RunDirectory) -> dict[int, Mapping[str, Any]]:
    """The attempts' resume records, reconstructed from the history.

    Its events are imported only here, because the checkpoint writer would take half as long again to start with them.
    """
    from clusterddp.history import beginnings, checkpoints

    records: dict[int, Mapping[str, Any]] = {}
    for event in directory.history():
        number = event.attempt
        if isinstance(event, beginnings.Resumed):
            if schema_error(event.parent, METRICS) is None and event.parent["attempt"] < number:
                records[number] = {"parent": event.parent}
        elif isinstance(event, (beginnings.Training, beginnings.Forked, checkpoints.Checkpoint)):
            records.setdefault(number, {"parent": None})
    return records


def kept(candidates: list[Checkpoint], keep: Keep) -> set[Checkpoint]:
    """The checkpoints to keep, of those of a lineage, newest first."""
    stay = set(candidates[: keep.last])
    if keep.every is not None:
        stay |= {checkpoint for checkpoint in candidates if checkpoint.step % keep.every == 0}
    if (best := best_of(candidates, keep)) is not None:
        stay.add(best[0])
    return stay


def best_of(candidates: Iterable[Checkpoint], keep: Keep) -> tuple[Checkpoint, float] | None:
    """The checkpoint with the best value of the metric in ``keep.best``, and the value. Of equal ones, the newest."""
    if keep.best is None:
        return None
    valued = [(checkpoint, value) for checkpoint in candidates if (value := checkpoint.metric(keep.best)) is not None]
    return min(valued, key=lambda pair: keep.order(pair[1]), default=None)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 / 10 else f"{count / 2**20:.1f} MiB"
