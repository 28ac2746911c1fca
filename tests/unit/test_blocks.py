"""Memory in blocks: which tensors have one alone, and that all bytes are somewhere."""

from __future__ import annotations

import pytest

from clusterddp.checkpoint import file_format, state_dict
from clusterddp.checkpoint.state_dict import LARGE, Blocks

SMALL = (0, 100)
FIRST = (100, 100 + LARGE)
SECOND = (FIRST[1], FIRST[1] + LARGE + 1)
SIZE = SECOND[1] + 10


def of(*spans: tuple[int, int]) -> Blocks:
    return Blocks(spans, SIZE, file_format.memory)


def test_a_large_tensor_is_alone_in_its_block_and_a_small_one_is_not() -> None:
    memory = of(SMALL, FIRST, SECOND)
    assert [memory.bytes_of(*span)[1] for span in (SMALL, FIRST, SECOND)] == [False, True, True]
    assert sum(len(view) for view in memory.views(0, SIZE)) == SIZE


def test_only_the_first_to_ask_for_a_block_is_told_that_it_is_alone() -> None:
    memory = of(FIRST)
    assert [memory.bytes_of(*FIRST)[1] for _ in range(2)] == [True, False]


def test_only_the_largest_tensors_have_blocks_where_there_are_very_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may have so many mappings."""
    monkeypatch.setattr(state_dict, "MOST", 1)
    memory = of(SMALL, FIRST, SECOND)
    assert [memory.bytes_of(*span)[1] for span in (SMALL, FIRST, SECOND)] == [False, False, True]
    assert len(list(memory.views(0, SIZE))) == 3
