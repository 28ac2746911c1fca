"""A restore in several ranks: what is damaged changes nothing, ranks share no memory afterwards, nothing is left."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests import ddp

SCRIPT = Path(__file__).parents[1] / "scripts" / "restoring.py"
SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints 1 and 2, which tests leave as they are."""
    folder = tmp_path_factory.mktemp("restore")
    ddp.run(SCRIPT, folder / "run", "save", ranks=1, folder=folder / "out")
    return folder / "run"


def restored(saved: Path, tmp_path: Path, case: str, ranks: int) -> list[str]:
    """The outputs of ranks that restore in that case."""
    ended = ddp.run(SCRIPT, saved, case, ranks=ranks, folder=tmp_path)
    return [ended.output(rank) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_ranks_have_the_state_and_none_keeps_the_memory_that_it_came_in(
    saved: Path, tmp_path: Path, ranks: int
) -> None:
    assert restored(saved, tmp_path, "whole", ranks) == ["step 2\n"] * ranks


@pytest.mark.parametrize(("case", "ranks"), [("damaged", 2), ("two_hosts", 4)])
def test_damage_anywhere_leads_to_the_previous_checkpoint_with_nothing_loaded(
    saved: Path, tmp_path: Path, case: str, ranks: int
) -> None:
    """Of the header, the checksums, and each chunk of the data; all ranks report why, if no checkpoint is left."""
    outputs = restored(saved, tmp_path, case, ranks)
    for output in outputs:
        lines = [line for line in output.splitlines() if "Trying the previous" not in line]
        assert lines[:5] == ["step 1"] * 5 and lines[5].startswith("refused: no checkpoint of this run can be read")
        assert output.count("is damaged: checksum mismatch in its data from byte") >= 2
    damage = "step-000000000002.attempt-0.safetensors is damaged: checksum mismatch in its data from byte"
    assert all(f"{damage} {place}" in outputs[0] for place in (0, 4194304, 8388608))
    assert "header" in outputs[0] and outputs[0].count("Trying the previous") == 7


def test_an_optimizer_that_keeps_what_was_read_shares_it_with_nobody(saved: Path, tmp_path: Path) -> None:
    assert restored(saved, tmp_path, "twice", 1) == ["step 2\n"]


def test_the_ranks_of_a_host_restore_in_three_collectives(saved: Path, tmp_path: Path) -> None:
    """Each takes as long as a part of the reading, if the state is small."""
    assert restored(saved, tmp_path, "counted", 2) == ["broadcast gather broadcast\n"] * 2


def test_json_of_any_length_reaches_all_ranks(saved: Path, tmp_path: Path) -> None:
    assert restored(saved, tmp_path, "lengths", 2) == ["the same\n"] * 2


def test_a_tensor_that_a_rank_keeps_is_no_other_ranks(saved: Path, tmp_path: Path) -> None:
    assert restored(saved, tmp_path, "kept", 2) == ["step 2\n"] * 2


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("without_memfd", "the shared copy of the checkpoint is an unlinked file in /dev/shm (memfd_create: No space"),
        ("small_shared_memory", "/dev/shm: No space left on device. Each rank of"),
    ],
)
def test_where_memory_cannot_be_shared_the_ranks_restore_all_the_same(
    saved: Path, tmp_path: Path, case: str, words: str
) -> None:
    first, second = restored(saved, tmp_path, case, 2)
    assert words in first and first.endswith("step 2\n") and second == "step 2\n"


@pytest.mark.parametrize("case", ["stranger", "own_hosts"])
def test_ranks_that_cannot_reach_each_others_memory_get_the_state_by_network(
    saved: Path, tmp_path: Path, case: str
) -> None:
    assert restored(saved, tmp_path, case, 3) == ["step 2\n"] * 3


def test_too_little_memory_is_an_error_on_all_ranks(saved: Path, tmp_path: Path) -> None:
    for output in restored(saved, tmp_path, "little_memory", 2):
        assert output.startswith("refused: restoring the checkpoint needs 0.0 GiB of memory on each node, but 0.0 GiB")
        assert "are free on the node of rank 1. Request more (--mem)" in output


def test_a_killed_restore_leaves_nothing_in_shared_memory(saved: Path, tmp_path: Path) -> None:
    before = set(SHARED_MEMORY.iterdir())
    ranks = ddp.start(SCRIPT, saved, "killed", ranks=2, folder=tmp_path).wait()
    assert ranks.codes[0] in (-signal.SIGKILL, 128 + signal.SIGKILL) and ranks.codes[1] != 0, ranks.text()
    assert set(SHARED_MEMORY.iterdir()) <= before
