"""Checkpoint files: whole or refused, kept or deleted, in their lineage or not; no processes."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from clusterddp.errors import CheckpointError, Superseded
from clusterddp.rundir import RunDirectory
from clusterddp.training import checkpoint as module
from clusterddp.training.checkpoint import Checkpoints, NotSaved, check_loadable, lineage
from clusterddp.training.state import join, load_state, split, state_of


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return directory


def attempt(directory: RunDirectory, parent: tuple[int, int] | None = None, **options: Any) -> Checkpoints:
    """A new attempt that has recorded what it goes on from."""
    checkpoints = Checkpoints(directory, directory.create_attempt(), **options)
    checkpoints.record_resume(parent)
    return checkpoints


def content(value: float = 1.0) -> dict[str, Any]:
    return {"model": {"weight": torch.full((1000,), value)}, "progress": {"step": 3}}


def names(directory: RunDirectory) -> list[str]:
    return sorted(path.name for path in directory.checkpoints.iterdir())


def test_a_checkpoint_reads_with_plain_torch_load(directory):
    saved = attempt(directory).save(5, content(2.0))
    loaded = torch.load(saved.checkpoint.path, weights_only=True)
    assert saved.checkpoint.path.name == "step-000000000005.attempt-0.pt"
    assert saved.bytes == saved.checkpoint.path.stat().st_size
    assert loaded["format"] == 1 and loaded["attempt"] == 0 and loaded["progress"] == {"step": 3}
    assert torch.equal(loaded["model"]["weight"], torch.full((1000,), 2.0))


def test_the_newest_are_kept_and_older_ones_go_only_after_a_newer_one_is_verified(directory, monkeypatch):
    checkpoints = attempt(directory, keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, content())
    kept = ["step-000000000002.attempt-0.pt", "step-000000000003.attempt-0.pt"]
    assert names(directory) == kept

    def damaged(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(module, "_verify", damaged)
    with pytest.raises(NotSaved, match=r"checkpoint needs 0\.0 GiB, .* free \(Input/output error\); keeping step 3"):
        checkpoints.save(4, content())
    assert names(directory) == kept


def test_a_write_that_fails_leaves_nothing_behind(directory, monkeypatch):
    checkpoints = attempt(directory)
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(NotSaved, match="No space left on device.*no older one to keep"):
        checkpoints.save(1, content())
    assert names(directory) == []


def test_a_half_written_file_of_a_killed_attempt_is_removed_and_never_restored(directory):
    attempt(directory).save(1, content())
    leftover = directory.checkpoints / ".step-000000000002.attempt-0.pt.00ff00ff.tmp"
    leftover.write_bytes(b"PK half")
    second = attempt(directory, (0, 1))
    assert second.restore()[1].step == 1  # type: ignore[index]
    second.save(3, content())
    assert not leftover.exists()


@pytest.mark.parametrize("damage", ["cut", "empty", "flip", "text"])
def test_a_damaged_checkpoint_is_reported_and_passed_over(directory, damage):
    first = attempt(directory)
    first.save(1, content())
    path = first.save(2, content()).checkpoint.path
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 4
    path.write_bytes({"cut": whole[:-30], "empty": b"", "flip": bytes(flipped), "text": b"not a zip"}[damage])
    told: list[str] = []
    next_one = Checkpoints(directory, directory.create_attempt(), on_damaged=lambda _, reason: told.append(reason))
    assert next_one.restore()[1].step == 1  # type: ignore[index]
    assert len(told) == 1 and "step-000000000002.attempt-0.pt is damaged" in told[0]


def test_no_checkpoint_is_a_fresh_start_and_only_damaged_ones_are_an_error(directory):
    assert Checkpoints(directory, 0).restore() is None
    path = attempt(directory).save(7, content()).checkpoint.path
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="does not start from step 0 by itself"):
        Checkpoints(directory, directory.create_attempt()).restore()


def test_a_superseded_attempt_neither_commits_nor_deletes(directory):
    old = attempt(directory, keep=1)
    old.save(1, content())
    attempt(directory, (0, 1))
    with pytest.raises(Superseded, match="attempt 0 superseded by attempt 1; not writing"):
        old.save(2, content())
    with pytest.raises(Superseded):
        old.record_resume(None)
    assert names(directory) == ["step-000000000001.attempt-0.pt"]


def test_the_lineage_leaves_out_what_was_written_after_a_run_went_on_elsewhere(directory):
    first = attempt(directory)
    first.check_newest = lambda: None  # type: ignore[method-assign]
    first.save(10, content())
    second = attempt(directory, (0, 10), keep=9)
    second.check_newest = lambda: None  # type: ignore[method-assign]
    second.save(20, content())
    directory.create_attempt()  # Attempt 2 ends before its first step.
    third = Checkpoints(directory, directory.create_attempt())
    third.record_resume((1, 20))
    first.save(99, content())
    second.save(98, content())

    fourth = Checkpoints(directory, directory.create_attempt())
    assert list(lineage(directory, 4)) == [(3, float("inf")), (1, 20), (0, 10)]
    assert [(one.attempt, one.step) for one in fourth.candidates()] == [(1, 20), (0, 10)]


def test_deleting_stays_within_the_lineage(directory):
    first = attempt(directory)
    first.check_newest = lambda: None  # type: ignore[method-assign]
    first.save(10, content())
    second = attempt(directory, (0, 10), keep=1)
    first.save(15, content())
    second.save(20, content())
    assert names(directory) == ["step-000000000015.attempt-0.pt", "step-000000000020.attempt-1.pt"]


def test_a_state_that_could_not_be_read_again_is_refused_before_it_matters(directory):
    bad = {"ema": {"decay": Path("no plain value")}}
    with pytest.raises(CheckpointError, match=r"the state of 'ema' cannot be loaded with weights_only=True.*Path"):
        check_loadable(bad)
    with pytest.raises(CheckpointError, match="weights_only"):
        attempt(directory).save(1, bad)
    assert names(directory) == []


def test_keys_carry_neither_ddp_nor_compile_and_load_back_into_both():
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    compiled = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.compile(torch.nn.Linear(2, 2)))
    state = state_of(torch.compile(compiled))
    assert state.keys() == plain.state_dict().keys()
    plain.load_state_dict(state)
    load_state(compiled, {name: torch.zeros_like(value) for name, value in state.items()})
    assert all(not parameter.any() for parameter in compiled.parameters())


def test_a_state_is_split_and_joined_unchanged():
    tensors = [torch.arange(3), torch.tensor(1.5), torch.ones(2, 2, dtype=torch.bfloat16)]
    state = {"a": [tensors[0], {"b": tensors[1]}], "c": (1, "x", None, tensors[2])}
    structure, found = split(state)
    assert [a is b for a, b in zip(found, tensors, strict=True)] == [True] * 3
    assert structure["c"][:3] == (1, "x", None)
    assert join(structure, found) == state
