"""The folder of checkpoints: which count, which are committed, which are deleted; no processes."""

from __future__ import annotations

import errno
import json
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clusterddp import protocol
from clusterddp.checkpoint import file_format, restore
from clusterddp.checkpoint.checkpoint import Checkpoint
from clusterddp.checkpoint.store import Checkpoints, lineage, of_run
from clusterddp.errors import CheckpointError, Superseded
from clusterddp.jobdef.job import Keep
from clusterddp.rundir.run_directory import RunDirectory
from tests.checkpoint_files import save
from tests.histories import happened
from tests.wording import raises, says

CONTENT = {"model": {"weight": torch.ones(10)}}


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return directory


def attempt(directory: RunDirectory, parent: tuple[int, int] | None = None) -> int:
    """A new attempt that has recorded what it resumes from."""
    number = directory.create_attempt()
    Checkpoints(directory, number, Keep()).record_resume(parent)
    return number


def steps(directory: RunDirectory) -> list[int]:
    return sorted(int(path.name[5:17]) for path in directory.checkpoints.glob("step-*"))


def metric(value: float) -> dict[str, str]:
    return {"metrics": json.dumps({"f1": value})}


def test_the_newest_are_kept(directory: RunDirectory) -> None:
    number = attempt(directory)
    for step in (1, 2, 3):
        save(directory, number, step, CONTENT, keep=Keep(2))
    assert steps(directory) == [2, 3]


def test_multiples_and_the_best_are_kept_beside_the_newest(directory: RunDirectory) -> None:
    number = attempt(directory)
    keep = Keep(last=1, every=10, best="f1", best_is="max")
    values = {4: 0.5, 8: 0.9, 10: 0.2, 12: 0.9, 16: 0.4, 19: float("nan")}
    for step, value in values.items():
        save(directory, number, step, CONTENT, keep=keep, facts=metric(value))
    save(directory, number, 22, CONTENT, keep=keep)
    assert steps(directory) == [10, 12, 22]
    lowest = attempt(directory, (number, 22))
    save(directory, lowest, 23, CONTENT, keep=Keep(last=1, best="f1", best_is="min"), facts=metric(0.7))
    assert steps(directory) == [10, 23]


def test_room_is_made_by_the_oldest_that_only_their_number_keeps(directory: RunDirectory) -> None:
    """Multiples, the best one and the two newest stay, as do those of other lineages."""
    first = attempt(directory)
    keep = Keep(last=6, every=10, best="f1")
    for step in (10, 11, 12, 13, 14, 15):
        save(directory, first, step, CONTENT, keep=keep, facts=metric(step == 12))
    second = attempt(directory, (first, 14))
    checkpoints = Checkpoints(directory, second, keep)
    assert checkpoints.make_room(1 << 60) is None, "it would not suffice"
    assert checkpoints.make_room(1 << 20, errno.EDQUOT) is None, "the disk's free space is not the quota's"
    assert [checkpoints.make_room(1) for _ in range(2)] == [11, None]
    assert steps(directory) == [10, 12, 13, 14, 15]
    attempt(directory, (first, 14))
    with pytest.raises(Superseded):
        Checkpoints(directory, second, Keep(last=6)).make_room(1)


def test_a_half_written_file_of_a_killed_attempt_is_removed_and_never_a_candidate(directory: RunDirectory) -> None:
    save(directory, attempt(directory), 1, CONTENT)
    leftover = directory.checkpoints / ".step-000000000002.attempt-0.safetensors.00ff00ff.tmp"
    leftover.write_bytes(b"half")
    second = attempt(directory, (0, 1))
    assert [one.step for one in Checkpoints(directory, second, Keep()).candidates()] == [1]
    save(directory, second, 3, CONTENT)
    assert not leftover.exists()


def test_a_temporarily_unreadable_checkpoint_is_not_skipped(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The previous one would cost the steps between them."""
    number = attempt(directory)
    save(directory, number, 1, CONTENT)
    save(directory, number, 2, CONTENT)
    errors, real = [OSError(errno.EIO, "Input/output error")], file_format.read

    def read(path: Any) -> Any:
        if errors:
            raise errors.pop()
        return real(path)

    monkeypatch.setattr(file_format, "read", read)
    newest = next(iter(Checkpoints(directory, number, Keep()).candidates()))
    assert newest.read().facts["step"] == "2" and not errors


def test_the_remains_of_an_attempt_killed_in_its_first_save_are_removed(directory: RunDirectory) -> None:
    """It is in no lineage; and what a newer attempt writes is not touched."""
    attempt(directory)
    left, newer = (directory.checkpoints / f".step-000000000002.attempt-{n}.safetensors.0f.tmp" for n in (0, 9))
    for path in (left, newer):
        path.write_bytes(b"half")
    save(directory, attempt(directory), 3, CONTENT)
    assert not left.exists() and newer.exists()


def test_a_checkpoint_that_cannot_be_deleted_is_reported_and_the_new_one_counts(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    number = attempt(directory)
    save(directory, number, 1, CONTENT)
    with monkeypatch.context() as patched:
        patched.setattr(Checkpoint, "delete", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        save(directory, number, 2, CONTENT, keep=Keep(1))
    says(capfd.readouterr().err)
    save(directory, number, 3, CONTENT, keep=Keep(1))
    assert steps(directory) == [3]


def test_an_unreadable_folder_hides_no_failure(directory: RunDirectory) -> None:
    checkpoints = Checkpoints(directory, attempt(directory), Keep())
    directory.checkpoints.rename(directory.path / "away")
    words = r"the checkpoint needs 1\.0 MiB \(No space left on device\)\. Could not list the others \(No such file"
    assert re.match(words, checkpoints.why_not(OSError(28, "No space left on device"), 1 << 20))


def test_a_used_up_quota_says_nothing_about_the_free_space_of_the_disk(directory: RunDirectory) -> None:
    words = "the checkpoint needs 1.0 MiB (Disk quota exceeded). There is no older checkpoint"
    error = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    assert Checkpoints(directory, attempt(directory), Keep()).why_not(error, 1 << 20) == words


def test_a_superseded_attempt_neither_commits_nor_deletes(directory: RunDirectory) -> None:
    old = attempt(directory)
    save(directory, old, 1, CONTENT, keep=Keep(1))
    attempt(directory, (0, 1))
    with raises(Superseded):
        save(directory, old, 2, CONTENT, keep=Keep(1))
    with pytest.raises(Superseded):
        Checkpoints(directory, old, Keep()).record_resume(None)
    assert steps(directory) == [1]
    assert not list(directory.checkpoints.glob(".*"))


def test_the_lineage_excludes_what_was_written_after_the_run_continued_elsewhere(directory: RunDirectory) -> None:
    first = attempt(directory)
    save(directory, first, 10, CONTENT)
    second = attempt(directory, (0, 10))
    save(directory, second, 20, CONTENT)
    directory.create_attempt()  # Attempt 2 ends before its first step.
    attempt(directory, (1, 20))
    save(directory, first, 99, CONTENT, fenced=False)
    save(directory, second, 98, CONTENT, fenced=False)

    fourth = Checkpoints(directory, directory.create_attempt(), Keep())
    assert list(lineage(directory, 4)) == [(3, float("inf")), (1, 20), (0, 10)]
    assert [(one.attempt, one.step) for one in fourth.candidates()] == [(1, 20), (0, 10)]


def test_a_committed_checkpoint_that_a_shared_disk_hides_is_waited_for(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks have moved to other nodes, which may not see yet what the last attempt saved (seed 50185460)."""
    first = attempt(directory)
    save(directory, first, 10, CONTENT)
    (path,) = directory.checkpoints.glob("step-*")
    hidden, waited = path.rename(directory.path / "hidden"), list[float]()

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            hidden.rename(path)

    monkeypatch.setattr("clusterddp.checkpoint.store.time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    monkeypatch.setenv(protocol.COMMITTED, "10")
    search = restore.Search(Checkpoints(directory, directory.create_attempt(), Keep()), lambda *_: None)
    found = search.next(Checkpoint, Checkpoint.read_head)
    assert found is not None and found[0].step == 10 and len(waited) == 3


def test_a_supervisor_waits_for_the_only_checkpoint_that_a_shared_disk_hides(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another node has created the folder of a sharded model's checkpoint (seed 8920)."""
    first = attempt(directory)
    save(directory, first, 10, CONTENT)
    happened(directory, {"time": 1.0, "attempt": first, "event": "checkpoint", "step": 10})
    (path,) = directory.checkpoints.glob("step-*")
    hidden, waited = path.rename(directory.path / "hidden"), list[float]()

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            hidden.rename(path)

    monkeypatch.setattr("clusterddp.checkpoint.store.time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    with raises(CheckpointError):
        of_run(directory).check_present()
    of_run(directory).check_present(within_s=60.0)
    assert len(waited) == 3


def test_a_committed_checkpoint_that_stays_away_is_reported(
    directory: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt(directory)
    Checkpoints(directory, directory.create_attempt(), Keep()).await_committed(10, within_s=0.0)
    says(capsys.readouterr().err)


def test_deleting_stays_within_the_lineage(directory: RunDirectory) -> None:
    first = attempt(directory)
    save(directory, first, 10, CONTENT)
    second = attempt(directory, (0, 10))
    save(directory, first, 15, CONTENT, fenced=False)
    save(directory, second, 20, CONTENT, keep=Keep(1))
    assert steps(directory) == [15, 20]


def test_a_file_under_another_steps_name_is_not_that_step(directory: RunDirectory) -> None:
    """Someone put a copy there by hand."""
    checkpoint = save(directory, attempt(directory), 1, CONTENT)
    checkpoint.path.rename(checkpoint.path.with_name("step-000000000009.attempt-0.safetensors"))
    (found,) = Checkpoints(directory, 0, Keep()).candidates()
    with raises(CheckpointError):
        found.read()


@pytest.mark.parametrize("name", ["step-000000000007.attempt-0.pt", "step-000000000007.attempt-0.safetensors"])
def test_a_file_of_another_format_is_an_error_that_says_so(directory: RunDirectory, name: Any) -> None:
    """A run of an older version must not restart from step 0 because its checkpoints have another name."""
    attempt(directory)
    (directory.checkpoints / name).write_bytes(b"PK\x03\x04 something else")
    (found,) = Checkpoints(directory, 0, Keep()).candidates()
    with raises(CheckpointError):
        found.read()
