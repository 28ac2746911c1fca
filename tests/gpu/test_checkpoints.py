"""Saves and restores of state that lies on devices."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from clusterddp.checkpoint.export import export
from clusterddp.jobdef.job import Keep
from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp
from tests.checkpoint_files import content_of
from tests.preempted import logged
from tests.trainings import events_of

SCRIPTS = Path(__file__).with_name("scripts")


def test_a_restore_holds_no_copy_of_the_optimizers_state_on_the_host_for_each_rank(tmp_path: Path) -> None:
    """The ranks of a host share one copy; with another for each rank, eight of them need nine times the memory.

    Ranks that have another kind of GPU then say that their resume is not exact.
    """
    script = SCRIPTS / "host_memory.py"
    ddp.start(script, tmp_path / "run", ranks=2, folder=tmp_path / "out", devices=2).expect(75)
    restored = ddp.run(script, tmp_path / "run", "Another GPU", ranks=2, folder=tmp_path / "out", devices=2)
    for rank in range(2):
        needs = re.search(r"needs (\S+)", restored.output(rank))
        assert needs is not None and float(needs[1]) < 0.3, restored.text()
    (resumed,) = events_of(RunDirectory(tmp_path / "run"), "resumed")
    assert resumed["inexact"] == ["on Another GPU instead of Stand-in GPU"]


def test_every_thread_is_on_the_ranks_device_and_captures_of_other_threads_do_not_concern_it(tmp_path: Path) -> None:
    """A thread begins on device 0, where its first call of CUDA would open a context on another rank's GPU."""
    ranks = ddp.run(SCRIPTS / "threads.py", tmp_path / "run", ranks=2, folder=tmp_path / "out", devices=2)
    assert "all threads were on cuda:1 [1]" in ranks.output(0)
    assert "all threads were on cuda:0 []" in ranks.output(1)


def test_a_step_on_a_stream_of_the_scripts_own_is_saved_as_it_ends(tmp_path: Path) -> None:
    """The copies of a save wait for it, and the next step waits for them."""
    late = {"STANDIN_CUDA_DELAY_MS": "20"}
    ddp.run(SCRIPTS / "side_stream.py", tmp_path / "run", ranks=1, folder=tmp_path / "out", devices=2, **late)
    saved = [content_of(path)["model"]["weight"] for path in sorted((tmp_path / "run" / "checkpoints").iterdir())]
    assert [weight.unique().tolist() for weight in saved] == [[1.0], [2.0], [3.0], [4.0]]


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_a_checkpoint_folder_beside_nccl_resumes_with_the_same_bits(tmp_path: Path, backend: str) -> None:
    script, out = SCRIPTS / "folder.py", tmp_path / "out"
    whole = ddp.run(script, tmp_path / "whole", 4, backend, ranks=2, folder=out, devices=2)
    ddp.run(script, tmp_path / "stopped", 2, backend, ranks=2, folder=out, devices=2)
    resumed = ddp.run(script, tmp_path / "stopped", 4, backend, ranks=2, folder=out, devices=2)
    for rank in range(2):
        assert resumed.output(rank) == whole.output(rank).replace("from 0", "from 2")


def test_the_best_checkpoint_by_a_value_on_the_device_is_kept_and_exported_and_started_from(tmp_path: Path) -> None:
    """The exported file is read without a device; another run starts from it on both."""
    script, run, file = SCRIPTS / "best.py", RunDirectory(tmp_path / "run"), tmp_path / "best.pt"
    ddp.run(script, run, ranks=2, folder=tmp_path / "out", devices=2)
    assert sorted(int(path.name[5:17]) for path in run.checkpoints.iterdir()) == [2, 4]
    export(run, file, step="best", keep=Keep(last=1, best="accuracy"))
    weight = torch.load(file, weights_only=True)["weight"]
    assert weight.device.type == "cpu"
    started = ddp.run(script, tmp_path / "other", file, ranks=2, folder=tmp_path / "out", devices=2)
    for rank in range(2):
        assert f"weight {weight.tolist()}" in started.output(rank)


def test_restored_tensors_are_where_they_were_on_devices_and_host(tmp_path: Path) -> None:
    """Those of parts, of an optimizer's groups and steps, of schedulers and per rank; also those that only the
    checkpoint has, and those on the second device of a rank."""
    script, out = SCRIPTS / "places.py", tmp_path / "out"
    saved = ddp.run(script, tmp_path / "run", 2, ranks=2, folder=out, devices=4)
    places = told(saved.output(0))
    for name in ("adam.param_groups.0.lr 0", "later.far 1", "own.far 1", "counting.state.0.step 0", "later.counts.0 h"):
        assert any(line.startswith(f"place {name}") for line in places), saved.text()
    resumed = ddp.run(script, tmp_path / "run", 2, ranks=2, folder=out, devices=4)
    for rank in range(2):
        assert told(resumed.output(rank)) == told(saved.output(rank))


def test_a_run_whose_memory_cannot_be_pinned_saves_and_logs_the_same_values(tmp_path: Path) -> None:
    """Copies are then not asynchronous, the reason is printed once, and the next kernel does not fail with it."""
    late = {"STANDIN_CUDA_DELAY_MS": "5"}
    run, out = RunDirectory(tmp_path / "run"), tmp_path / "out"
    said = ddp.run(SCRIPTS / "unpinned.py", run, ranks=2, folder=out, devices=2, **late).output(0)
    assert said.count("could not pin") == 2, said  # the snapshot, and batches and values
    whole = content_of(max(run.checkpoints.iterdir()))
    assert [tensor.tolist() for tensor in whole["seen"]["tensors"]] == [[[1.0] * 4] * 2] * 6
    losses = [line["loss"] for line in logged(run)]
    assert len(losses) == 6 and losses == sorted(losses, reverse=True)


def test_the_time_in_which_a_device_copies_the_state_counts_as_the_stall_of_a_save(tmp_path: Path) -> None:
    """The host continues meanwhile. The interval of saves depends on it."""
    late, run = {"STANDIN_CUDA_DELAY_MS": "200"}, RunDirectory(tmp_path / "run")
    ddp.run(SCRIPTS / "late_copies.py", run, ranks=1, folder=tmp_path / "out", devices=1, **late)
    saved, _ = events_of(run, "checkpoint")
    assert saved["step"] == 5 and saved["blocked_s"] >= 2 * 0.2, saved  # two tensors


def told(output: str) -> list[str]:
    """The lines of places.py."""
    return [line for line in output.splitlines() if line.startswith(("place ", "same "))]
