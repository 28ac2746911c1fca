"""Models that torch's fully_shard has sharded: stopped and continued, on the same number of ranks and on others."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from clusterddp.checkpoint.export import export
from clusterddp.checkpoint.store import of_run
from clusterddp.rundir.run_directory import RunDirectory
from tests import ddp
from tests.cli import clusterddp
from tests.runs_on_disk import outcome_of
from tests.wording import says

SHARDED = Path(__file__).parents[1] / "scripts" / "sharded.py"


def train(run_dir: Path, *options: object, ranks: int = 2, code: int = 0) -> ddp.Ranks:
    return ddp.start(SHARDED, run_dir, *options, ranks=ranks, folder=run_dir.parent / "out").expect(code)


def state(ranks: ddp.Ranks, moment: str) -> str:
    """The step and the digest of the whole state that each rank has printed, the same on all."""
    found = [line for rank in range(len(ranks.outputs)) for line in ranks.output(rank).splitlines()]
    (one,) = {line for line in found if line.startswith(moment)}
    return one.removeprefix(moment)


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in RunDirectory(run_dir).events() if event["event"] == name]


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in RunDirectory(run_dir).metrics()]


def samples(run_dir: Path) -> list[tuple[int, float]]:
    """For each step, a number with a bit for each sample of all ranks."""
    return [(line["step"], line["indices"]) for line in RunDirectory(run_dir).metrics()]


def check_stopped_equals_whole(folder: Path, *options: object, ranks: int = 2) -> None:
    """A run of 8 steps that is stopped in step 4 ends as one that is not."""
    uninterrupted = train(folder / "whole", 8, *options, ranks=ranks)
    train(folder / "stopped", 8, "--stop-in", 4, *options, ranks=ranks, code=75)
    resumed = train(folder / "stopped", 8, *options, ranks=ranks)
    assert state(resumed, "begin").split()[0] == "5"
    (event,) = events(folder / "stopped", "resumed")
    assert event["inexact"] == [], event
    assert not events(folder / "stopped", "diverged") and not events(folder / "stopped", "checkpoint_failed")
    assert state(resumed, "end") == state(uninterrupted, "end")
    assert losses(folder / "stopped") == losses(folder / "whole")
    assert samples(folder / "stopped") == samples(folder / "whole")


def test_a_preempted_run_equals_an_uninterrupted_one_and_torchs_own_reader_reads_its_checkpoint(tmp_path: Path) -> None:
    check_stopped_equals_whole(tmp_path, "--every", 3)
    run = RunDirectory(tmp_path / "stopped")
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [
        "step-000000000005.attempt-0",
        "step-000000000006.attempt-1",
        "step-000000000008.attempt-1",
    ]
    # A model of its own, in one process without ranks, reads the same from both runs' files.
    newest = read_by_torch(run.checkpoints / "step-000000000008.attempt-1")
    other = read_by_torch(tmp_path / "whole" / "checkpoints" / "step-000000000008.attempt-0")
    assert newest.keys() == other.keys()
    assert [name for name, tensor in newest.items() if not torch.equal(tensor, other[name])] == []


def read_by_torch(folder: Path) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader, planner = HuggingFaceStorageReader(str(folder)), DefaultLoadPlanner()
    metadata = reader.read_metadata()
    tensors = {
        name: torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in metadata.state_dict_metadata.items()
        if isinstance(one, TensorStorageMetadata) and name != "checksums"
    }
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    planner.set_up_planner(tensors, metadata)
    reader.read_data(planner.create_local_plan(), planner).wait()
    return tensors


@pytest.mark.product
@pytest.mark.parametrize("columns", [[], ["--columns"]])
def test_other_numbers_of_ranks_load_what_was_saved_to_the_last_bit(tmp_path: Path, columns: list[str]) -> None:
    run_dir, ended, steps = tmp_path / "run", "", 0
    for ranks in (2, 3, 1, 4):
        steps += 3
        trained = train(run_dir, steps, *columns, ranks=ranks)
        if ended:
            assert state(trained, "begin") == ended
        ended = state(trained, "end")
    train(tmp_path / "whole", steps, *columns, ranks=2)
    assert samples(run_dir) == samples(tmp_path / "whole")


@pytest.mark.product
@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        ([], 3),
        (["--columns"], 3),
        (["--replicas", 2], 4),
        (["--precision"], 2),
        (["--evaluate"], 2),
        (["--accumulate", 3], 2),
        (["--offload"], 2),
        (["--compile"], 2),
        (["--recompute"], 2),
        (["--scaler"], 2),
        (["--ema"], 2),
        (["--precision", "--compile", "--recompute", "--ema", "--accumulate", 2], 2),
    ],
)
def test_a_preempted_run_equals_an_uninterrupted_one(tmp_path: Path, options: list[Any], ranks: int) -> None:
    check_stopped_equals_whole(tmp_path, *options, ranks=ranks)


@pytest.mark.product
def test_neither_a_save_nor_a_load_makes_a_whole_tensor(tmp_path: Path) -> None:
    """The largest has 48 x 48 elements. The second run loads what one rank alone has saved."""
    for ranks, steps in ((1, 2), (4, 4), (2, 6)):
        trained = train(tmp_path / "run", steps, "--every", 1, "--largest", ranks=ranks)
        for rank in range(ranks):
            line = next(line for line in trained.output(rank).splitlines() if line.startswith("largest"))
            assert int(line.split()[1]) <= 48 * 48 // ranks


@pytest.mark.product
@pytest.mark.parametrize(("scores", "best"), [([9, 1, 2, 3, 4], 1), ([1, 2, 3, 4, 5], 4)])
def test_the_best_checkpoint_is_kept_also_by_a_score_after_the_loop(
    tmp_path: Path, scores: list[int], best: int
) -> None:
    train(tmp_path / "run", 4, "--every", 1, "--best", *scores)
    kept = of_run(RunDirectory(tmp_path / "run")).candidates()
    assert max(kept, key=lambda checkpoint: checkpoint.metric("score") or 0).step == best
    assert best in [checkpoint.step for checkpoint in kept]
    train(tmp_path / "run", 4, "--best", *scores)


@pytest.mark.product
def test_a_rank_that_dies_between_its_own_file_and_the_manifest_leaves_no_part_that_counts(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 12)
    script = (SHARDED, tmp_path / "run", 12, "--every", 6, "--die-after", 6)
    ranks = ddp.start(*script, ranks=2, folder=tmp_path / "out").wait()
    assert ranks.codes[1] == -signal.SIGKILL and ranks.codes[0] != 0
    folder = tmp_path / "run" / "checkpoints" / "step-000000000006.attempt-0"
    assert sorted(path.name for path in folder.iterdir()) == ["rank-00000.safetensors", "rank-00001.safetensors"]
    again = train(tmp_path / "run", 12)
    assert state(again, "begin").split()[0] == "0"
    assert state(again, "end") == state(whole, "end")
    assert not folder.exists()


@pytest.mark.product
def test_a_rank_that_dies_in_the_last_save_does_not_hold_the_others(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    shape = ["--local", "--device", "cpu", "--gpus", "2", "--run-dir", run]
    clusterddp("submit", SHARDED, *shape, "--", run, 6, "--die-after", 6)
    outcome = outcome_of(run)
    assert outcome is not None
    assert (outcome["state"], outcome["step"], outcome["attempts"]) == ("completed", 6, 2)


@pytest.mark.product
def test_a_stop_and_a_save_between_gradients_that_are_not_reduced_yet_wait_for_the_optimizers_step(
    tmp_path: Path,
) -> None:
    """The stop in step 4 comes after step 6, where the optimizer steps. So does the save that is due after step 2."""
    options = ["--accumulate", 3, "--unsynced", "--every", 2]
    uninterrupted = train(tmp_path / "whole", 9, *options)
    train(tmp_path / "stopped", 9, "--stop-in", 4, *options, code=75)
    saved = [event["step"] for event in events(tmp_path / "stopped", "checkpoint")]
    resumed = train(tmp_path / "stopped", 9, *options)
    assert saved == [3, 6]
    assert state(resumed, "begin").split()[0] == "6"
    assert [event["inexact"] for event in events(tmp_path / "stopped", "resumed")] == [[]]
    assert state(resumed, "end") == state(uninterrupted, "end")


@pytest.mark.product
@pytest.mark.parametrize(("first", "second"), [(["--plain"], []), ([], ["--plain"])])
def test_a_checkpoint_of_the_other_kind_is_refused(tmp_path: Path, first: list[str], second: list[str]) -> None:
    train(tmp_path / "run", 2, *first)
    said = train(tmp_path / "run", 4, *second, code=1)
    says(next(line for line in said.output(0).splitlines() if "CheckpointError: " in line))


@pytest.mark.product
@pytest.mark.parametrize(
    ("first", "second", "target"),
    [
        (["--plain"], [], "model.safetensors"),
        (["--plain"], ["--columns"], "model.pt"),
        ([], ["--plain"], "model.safetensors"),
        (["--columns"], [], "folder"),
    ],
)
def test_an_export_and_a_warm_start_are_the_bridge_to_another_kind(
    tmp_path: Path, first: list[str], second: list[str], target: str
) -> None:
    """On another number of ranks, each of which makes no whole tensor."""
    trained = train(tmp_path / "run", 2, *first)
    export(RunDirectory(tmp_path / "run"), tmp_path / target)
    largest = [] if "--plain" in second else ["--largest"]
    begun = train(tmp_path / "other", 2, *second, *largest, "--init-from", tmp_path / target, ranks=3)
    assert state(begun, "model ") == state(trained, "trained ")
    for rank in range(3 if largest else 0):
        line = next(line for line in begun.output(rank).splitlines() if line.startswith("largest"))
        assert int(line.split()[1]) <= 48 * 48 // 3
    again = train(tmp_path / "other", 4, *second, ranks=3)  # a resume needs no file
    assert state(again, "begin ").split()[0] == "2"


@pytest.mark.product
def test_a_file_that_does_not_fit_a_sharded_model_is_refused_on_all_ranks(tmp_path: Path) -> None:
    train(tmp_path / "run", 2, "--plain")
    export(RunDirectory(tmp_path / "run"), tmp_path / "model.pt")
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    torch.save({**weights, "norm.bias": torch.zeros(3)}, tmp_path / "shape.pt")
    torch.save({"norm.bias": torch.zeros(48)}, tmp_path / "names.pt")
    for file in ("shape.pt", "names.pt", "none.pt"):
        said = train(tmp_path / "other", 2, "--init-from", tmp_path / file, code=1)
        says(next(line for line in said.output(1).splitlines() if ": init_from: " in line))


@pytest.mark.product
def test_ranks_with_different_tensors_fail_after_the_first_step(tmp_path: Path) -> None:
    said = train(tmp_path / "run", 2, "--wrong", "keys", code=1)
    says(next(line for line in said.output(0).splitlines() if "CheckpointError: " in line))


@pytest.mark.product
def test_buffers_that_differ_between_ranks_are_reported(tmp_path: Path) -> None:
    train(tmp_path / "run", 2, "--wrong", "buffers")
    (event,) = events(tmp_path / "run", "diverged")
    assert event["parts"] == ["model"]


@pytest.mark.product
@pytest.mark.parametrize("damage", ["missing", "short", "changed", "foreign"])
def test_the_checkpoint_before_counts_if_a_ranks_file_is_damaged(tmp_path: Path, damage: str) -> None:
    before = train(tmp_path / "run", 6, "--every", 3)
    newest = tmp_path / "run" / "checkpoints" / "step-000000000006.attempt-0"
    file = newest / "rank-00001.safetensors"
    data = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "short":
        file.write_bytes(data[:-1])
    elif damage == "changed":
        changed = bytearray(data)
        changed[len(data) // 2] ^= 1
        file.write_bytes(changed)
    else:
        train(tmp_path / "other", 6, "--batch", 24)
        file.write_bytes((tmp_path / "other" / "checkpoints" / newest.name / file.name).read_bytes())
    again = train(tmp_path / "run", 6)
    assert state(again, "begin").split()[0] == "3"
    assert state(again, "end") == state(before, "end")
    (event,) = events(tmp_path / "run", "checkpoint_damaged")
    assert event["step"] == 6
    says(event["reason"])
