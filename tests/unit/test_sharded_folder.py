"""The folders of sharded checkpoints: what makes one count, and what is left at each point of a save or a deletion."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from clusterddp.checkpoint import file_format
from clusterddp.checkpoint.checkpoint import Checkpoint
from clusterddp.checkpoint.sharded.folder import (
    MANIFEST,
    Chunk,
    Manifest,
    RankFile,
    ShardedCheckpoint,
    ShardedTensor,
    rank_file,
)
from clusterddp.checkpoint.sharded.rank_files import RankFiles
from clusterddp.checkpoint.store import Checkpoints
from clusterddp.errors import CheckpointError, Superseded
from clusterddp.jobdef.job import Keep
from clusterddp.rundir.files import write_json
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.runs.pruning import delete_all, plan_for
from tests.checkpoint_files import file_bytes
from tests.wording import raises

RANKS = 2
TENSORS = {"model.w": ShardedTensor("F32", (5,), 0, (Chunk(0, (0,), (3,)), Chunk(1, (3,), (2,))))}


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    found = RunDirectory(tmp_path / "run")
    found.create()
    return found


def attempt(directory: RunDirectory) -> Checkpoints:
    """A new attempt, which resumes from the newest checkpoint."""
    checkpoints = Checkpoints(directory, directory.create_attempt(), Keep(1))
    newest = next(iter(checkpoints.candidates()), None)
    checkpoints.record_resume(None if newest is None else (newest.attempt, newest.step))
    return checkpoints


def write_rank(checkpoints: Checkpoints, step: int, rank: int) -> RankFile:
    files = RankFiles(checkpoints, rank)
    temporary = files.temporary(step)
    chunk = torch.arange(5.0)[3 * rank :][: 3 - rank] + step
    temporary.write_bytes(file_bytes({"model": {"w": chunk}}, {"step": str(step)}))
    return files.commit(temporary)


def manifest(checkpoints: Checkpoints, step: int, files: list[RankFile]) -> Manifest:
    return Manifest(step, checkpoints.sharded(step).attempt, {}, tuple(files), TENSORS)


def save(checkpoints: Checkpoints, step: int) -> ShardedCheckpoint:
    """As the writers of two ranks do it."""
    files = [write_rank(checkpoints, step, rank) for rank in range(RANKS)]
    saved = RankFiles(checkpoints, 0).commit_manifest(step, manifest(checkpoints, step, files).encoded())
    checkpoints.delete_old()
    return saved


def newest_whole(checkpoints: Checkpoints) -> int | None:
    """The step that a resume would take."""
    for candidate in checkpoints.candidates():
        try:
            candidate.verify()
            return candidate.step
        except CheckpointError:
            continue
    return None


def test_a_manifest_is_read_as_it_was_written(directory: RunDirectory) -> None:
    written = manifest(attempt(directory), 3, [RankFile(10, 1), RankFile(20, 2)])
    assert Manifest.decoded(written.encoded()) == written


@pytest.mark.parametrize("place", range(0, 260, 37))
def test_a_changed_manifest_is_damaged(directory: RunDirectory, place: int) -> None:
    data = bytearray(manifest(attempt(directory), 3, [RankFile(10, 1), RankFile(20, 2)]).encoded())
    data[place] ^= 1
    with pytest.raises(file_format.Damaged):
        Manifest.decoded(bytes(data))


def test_only_the_newest_stays_and_a_folder_without_a_manifest_counts_for_nothing(directory: RunDirectory) -> None:
    checkpoints = attempt(directory)
    save(checkpoints, 1)
    save(checkpoints, 2)
    assert sorted(os.listdir(directory.checkpoints)) == ["step-000000000002.attempt-0"]
    write_rank(checkpoints, 3, 0)
    write_rank(checkpoints, 3, 1)
    assert newest_whole(checkpoints) == 2
    save(attempt(directory), 4)  # deletes what the first attempt has left of step 3
    assert sorted(os.listdir(directory.checkpoints)) == ["step-000000000004.attempt-1"]


@pytest.mark.parametrize("damage", ["missing", "short", "foreign", "other manifest", "no json"])
def test_an_incomplete_checkpoint_is_named_and_does_not_count(directory: RunDirectory, damage: str) -> None:
    checkpoints = Checkpoints(directory, directory.create_attempt(), Keep(2))
    older, newest = save(checkpoints, 1), save(checkpoints, 2)
    file = newest.path / rank_file(1)
    if damage == "missing":
        file.unlink()
    elif damage == "short":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "foreign":  # of the same size
        file.write_bytes((older.path / rank_file(1)).read_bytes())
    elif damage == "other manifest":
        newest.manifest_file.write_bytes(older.manifest_file.read_bytes())
    else:
        newest.manifest_file.write_bytes(b"{")
    with raises(CheckpointError):
        newest.verify()
    assert newest_whole(checkpoints) == 1


def test_a_superseded_attempt_commits_neither_a_file_nor_a_manifest(directory: RunDirectory) -> None:
    old = attempt(directory)
    files = [write_rank(old, 1, rank) for rank in range(RANKS)]
    temporary = RankFiles(old, 0).temporary(2)
    temporary.write_bytes(b"late")
    directory.create_attempt()
    with pytest.raises(Superseded):
        RankFiles(old, 0).commit(temporary)
    with pytest.raises(Superseded):
        RankFiles(old, 0).commit_manifest(1, manifest(old, 1, files).encoded())
    assert list(old.candidates()) == []


def test_the_files_of_a_checkpoint_are_never_replaced(directory: RunDirectory) -> None:
    checkpoints = attempt(directory)
    save(checkpoints, 1)
    for rank in range(RANKS):
        with pytest.raises(FileExistsError):
            RankFiles(checkpoints, rank).temporary(1)


@pytest.mark.parametrize("calls", range(4))
def test_a_deletion_that_is_interrupted_leaves_no_part_that_counts(
    directory: RunDirectory, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(directory, directory.create_attempt(), Keep(2))
    saved, newest = save(checkpoints, 1), save(checkpoints, 2)
    left, unlink = [calls], os.unlink

    def interrupted(*arguments: object, **options: object) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        unlink(*arguments, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", interrupted)
        try:
            saved.delete()
        except KeyboardInterrupt:
            assert calls < 3
    assert (saved.path / MANIFEST).exists() == (calls == 0)
    for candidate in checkpoints.candidates():
        candidate.verify()
    save(Checkpoints(directory, 0, Keep(1)), 3)
    assert sorted(os.listdir(directory.checkpoints)) == ["step-000000000003.attempt-0"], newest


def test_a_rank_that_is_ahead_keeps_its_file(directory: RunDirectory) -> None:
    """Rank 0's writer may be slow to begin a save, while rank 1 is already making the next one."""
    checkpoints = attempt(directory)
    write_rank(checkpoints, 1, 1)
    ahead = RankFiles(checkpoints, 1).temporary(2)
    ahead.touch()
    write_rank(checkpoints, 1, 0)
    assert ahead.exists()
    assert sorted(os.listdir(checkpoints.sharded(1).path)) == [rank_file(0), rank_file(1)]


class Killed(BaseException):
    """Stands for a SIGKILL."""


class Kill:
    """Lets this many calls of the system that change files succeed. From then on the process does nothing more."""

    def __init__(self, calls: int, patch: pytest.MonkeyPatch) -> None:
        self.left = calls
        for name in ("open", "mkdir", "rename", "replace", "unlink", "rmdir", "fsync"):
            patch.setattr(os, name, self._counted(getattr(os, name), opens=name == "open"))

    def _counted(self, call: Any, opens: bool) -> Any:
        def counted(*arguments: Any, **options: Any) -> Any:
            if not opens or arguments[1] & os.O_CREAT:
                if self.left <= 0:
                    raise Killed
                self.left -= 1
            return call(*arguments, **options)

        return counted


def train(directory: RunDirectory, promised: list[int]) -> None:
    """An attempt that saves three times and keeps one checkpoint. ``promised``: the steps whose save was reported."""
    checkpoints = attempt(directory)
    for step in (1, 2, 3):
        files = [write_rank(checkpoints, step, rank) for rank in range(RANKS)]
        RankFiles(checkpoints, 0).commit_manifest(step, manifest(checkpoints, step, files).encoded())
        promised.append(step)
        checkpoints.delete_old()


def test_a_kill_before_any_call_of_any_writer_loses_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ranks' files, the manifest, and the deletion of the checkpoint before."""
    for calls in itertools.count():
        directory, promised = RunDirectory(tmp_path / str(calls)), list[int]()
        directory.create()
        with monkeypatch.context() as patched:
            kill = Kill(calls, patched)
            try:
                train(directory, promised)
            except Killed:
                pass
            killed = kill.left <= 0
        checkpoints = attempt(directory)
        found = newest_whole(checkpoints)
        assert found is not None if promised else found in (None, 1), (calls, promised)
        assert not promised or promised[-1] <= (found or 0) <= promised[-1] + 1, (calls, promised, found)
        assert [candidate.step for candidate in checkpoints.candidates()][:1] == ([found] if found else []), calls
        save(checkpoints, 9)
        assert [path.name[:17] for path in directory.checkpoints.iterdir()] == ["step-000000000009"], calls
        if not killed:
            break
    assert calls > 40


def test_a_copy_is_a_checkpoint_of_the_other_run(directory: RunDirectory, tmp_path: Path) -> None:
    saved = save(attempt(directory), 7)
    other = RunDirectory(tmp_path / "fork")
    other.create()
    copy = attempt(other).sharded(7)
    saved.copy_to(copy)
    copy.verify()
    assert [candidate.step for candidate in attempt(other).candidates()] == [7]


def test_prune_deletes_folders(directory: RunDirectory) -> None:
    checkpoints = Checkpoints(directory, directory.create_attempt(), Keep(3))
    directory.job_file.write_text("module: x\n")
    older, newest = save(checkpoints, 1), save(checkpoints, 2)
    write_rank(checkpoints, 3, 0)
    write_json(directory.outcome_file, {"state": "completed", "step": 2, "attempts": 1, "reason": "why"})
    plan = plan_for(directory, 1, logs=False)
    assert older.size < plan.size < 2 * older.size
    delete_all([plan])
    assert list(directory.checkpoints.iterdir()) == [newest.path]
    newest.verify()


def test_files_and_folders_stand_side_by_side(directory: RunDirectory) -> None:
    """A run whose model was sharded later: each is what it is, and the newest counts."""
    from tests.checkpoint_files import save as save_file

    checkpoints = Checkpoints(directory, directory.create_attempt(), Keep(3))
    save_file(directory, 0, 1, {"model": {"w": torch.zeros(5)}}, keep=Keep(3))
    save(checkpoints, 2)
    assert [type(candidate) for candidate in checkpoints.candidates()] == [ShardedCheckpoint, Checkpoint]
