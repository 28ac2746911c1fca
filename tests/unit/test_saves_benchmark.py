"""The arithmetic of ``benchmarks.saves``: what is judged, and against which limit."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import rows, saves
from benchmarks.savers import CALLS_AND_COPY, EMPTY_LOOP, OURS, RAW
from benchmarks.saves import CPU, NO_SAVE


def figures(ours_ms: float, limit_ms: float, lost_ms: float = 0.0) -> dict[str, Any]:
    both = {OURS: [ours_ms / 1000] * 5, CALLS_AND_COPY: [limit_ms / 1000] * 5}
    lost = {OURS: [(lost_ms + 1) / 1000] * 5, NO_SAVE: [0.001] * 5, CPU: [0.008] * 5, EMPTY_LOOP: [0.009] * 5}
    rest = {"cores": 4, "peers": {}, "growth": 15e6, "bytes": 10e6}
    return {"stall": both, "cpu": both, "lost": {saves.CORE_FREE: lost, saves.ALL_CORES: lost}, **rest}


def met(found: list[rows.Row]) -> list[bool | None]:
    return [row.met for row in found]


@pytest.mark.parametrize(
    ("ours", "limit", "wanted"), [(1.4, 1.0, True), (1.6, 1.0, False), (114.0, 100.0, True), (116.0, 100.0, False)]
)
def test_a_stall_may_be_half_a_millisecond_or_15_percent_above_the_limit(
    ours: float, limit: float, wanted: bool
) -> None:
    stall, cpu, *_ = met(saves.rows_of("10 MB", figures(ours, limit)))
    assert stall is cpu is wanted


@pytest.mark.parametrize(("lost", "wanted"), [(1.9, True), (2.1, False)])
def test_training_may_lose_the_writers_cpu_time_by_the_cores_more_than_without_a_save(
    lost: float, wanted: bool
) -> None:
    row, row_of_all_cores, *_ = saves.rows_of("10 MB", figures(1.0, 1.0, lost))[2:]
    assert row_of_all_cores.met is wanted
    assert row.limit == pytest.approx(2.0) and row.ours == pytest.approx(lost) and met([row]) == [wanted]


@pytest.mark.parametrize(("lost", "wanted"), [(9.1, True), (9.3, False)])
def test_training_on_all_cores_may_lose_little_more_than_beside_an_empty_loop(lost: float, wanted: bool) -> None:
    row = saves.rows_of("10 MB", figures(1.0, 1.0, lost))[-2]
    assert row.limit == pytest.approx(8.0) and row.ours == pytest.approx(lost) and met([row]) == [wanted]


@pytest.mark.parametrize(("raw_ms", "wanted"), [(100.0, True), (60.0, False)])
def test_a_save_is_durable_within_one_and_a_half_raw_writes(raw_ms: float, wanted: bool) -> None:
    peers = {OURS: [[0.001, 0.0, 0.1]] * 5, RAW: [[0.001, 0.0, raw_ms / 1000]] * 5}
    durable, growth = saves.rows_of("10 MB", {**figures(1.0, 1.0), "peers": peers})[-2:]
    assert (met([durable, growth])) == [wanted, True] and growth.ratio == 1.5


def test_a_state_that_takes_more_memory_than_is_free_is_left_out() -> None:
    case = saves.Case("1 GB", 1_000_000_000, lambda: pytest.fail("made"), 1, 1, peers=1)
    assert saves.too_large(case, with_peers=False, free=6.1e9) is None
    assert saves.too_large(case, with_peers=True, free=6.1e9) == "1 GB (10 GB needed, 6 GB free)"
    assert saves.too_large(case, with_peers=False, free=5.9e9) is not None
