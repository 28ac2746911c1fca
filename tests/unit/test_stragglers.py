"""Scores of ranks and nodes by the times of their steps, and what a slow one costs the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from clusterddp.report.stragglers import Scores, scores, waits
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.timing import SLOW_RATIO, TimedInterval, read_timings
from tests.timings import BEGAN, timing_lines, write_timings

NODES = ["n1", "n1", "n2", "n2", "n3", "n3"]
OWN = ("own_s", 2.0)


def simulated(folder: Path, hosts: list[str] = NODES, **how: object) -> tuple[TimedInterval, ...]:
    """A run's first 200 s."""
    folder.mkdir(exist_ok=True)
    run = RunDirectory(folder)
    write_timings(run, timing_lines(hosts, 200.0, **how))  # type: ignore[arg-type]
    return read_timings(run).intervals


def scored(folder: Path, hosts: list[str] = NODES, **how: object) -> Scores:
    found = scores(simulated(folder, hosts, **how))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("phase", "factor", "words"),
    [("own_s", 2.0, "compute"), ("data_s", 60.0, "waiting for its batches"), ("save_s", 900.0, "saves")],
)
def test_a_slow_rank_is_named_with_the_phase_that_is_slow(
    tmp_path: Path, phase: str, factor: float, words: str
) -> None:
    found = scored(tmp_path, slow={3: (phase, factor)})
    slow = [one for one in found.ranks if one.slow]
    assert [(one.rank, one.host, one.phase) for one in slow] == [(3, "n2", phase)]
    assert slow[0].relative is not None and slow[0].relative < 1 / SLOW_RATIO
    assert slow[0].own is not None and slow[0].own > 0.95  # it was so from the beginning
    assert min(one.relative or 0.0 for one in found.ranks if one.rank != 3) > 0.95
    assert found.sentence().startswith("rank 3 (n2): ")
    assert found.sentence().endswith(f" times as long per step as the fastest, in {words}")


def test_a_node_is_named_rather_than_its_ranks(tmp_path: Path) -> None:
    found = scored(tmp_path, slow={2: OWN, 3: OWN})
    assert [one.host for one in found.nodes if one.slow] == ["n2"]
    assert found.sentence() == "n2: 2.0 times as long per step as the fastest, in compute"
    alone = scored(tmp_path / "alone", ["n1"] * 6, slow={2: OWN})
    assert alone.nodes == ()
    assert alone.sentence().startswith("rank 2 (n1): 2.0 times")


def test_a_rank_that_was_faster_before_and_one_that_all_wait_for_are_told_apart(tmp_path: Path) -> None:
    """All ranks slow down at the same time; against each other none is slow."""
    found = scored(tmp_path, slow=dict.fromkeys(range(6), OWN), after=100.0)
    assert min(one.relative or 0.0 for one in found.ranks) > 0.95
    assert max(one.own or 1.0 for one in found.ranks) < 1 / SLOW_RATIO
    assert found.sentence() == "all ranks: 2.0 times as long per step as when it was fastest, in compute"


@pytest.mark.parametrize("slow", [{}, {3: ("own_s", 1.3)}, {3: ("data_s", 2.0)}, {3: ("save_s", 50.0)}])
def test_small_differences_are_no_news(tmp_path: Path, slow: dict[int, tuple[str, float]]) -> None:
    """Also where one phase takes many times as long, but little of a step."""
    found = scored(tmp_path, slow=slow)
    assert not [one for one in [*found.ranks, *found.nodes] if one.slow]
    assert found.sentence() == ""


def test_many_slow_ranks_are_counted_and_the_slowest_come_first(tmp_path: Path) -> None:
    slow = {rank: ("own_s", 2.0 + rank) for rank in range(5)}
    found = scored(tmp_path, [f"n{rank}" for rank in range(8)], slow=slow)
    assert found.sentence().startswith("n4: 5.9 times") or found.sentence().startswith("n4: 6.0 times")
    assert found.sentence().endswith(". 2 others")


def test_only_the_newest_attempt_counts_and_unknown_work_has_no_score(tmp_path: Path) -> None:
    simulated(tmp_path, slow={3: OWN})
    timed = simulated(tmp_path, attempt=1, begin=BEGAN + 1000.0)
    found = scores(timed)
    assert found is not None and found.attempt == 1 and found.sentence() == ""
    assert {one["rank"] for one in found.as_json()["ranks"]} == set(range(6))
    assert found.as_json()["nodes"][0].keys() == found.as_json()["ranks"][0].keys() - {"rank"}
    unknown = [replace(one, seconds={**one.seconds, "own_s": (None,) * 6}) for one in timed]
    assert scores(unknown) is scores([]) is None
    assert list(waits(unknown)) == []


def test_a_rank_alone_is_compared_with_itself(tmp_path: Path) -> None:
    found = scored(tmp_path, ["n1"], slow={0: OWN}, after=100.0)
    (one,) = found.ranks
    assert one.relative is None and one.slow
    assert found.sentence() == "rank 0 (n1): 2.0 times as long per step as when it was fastest, in compute"


def test_the_others_wait_for_the_share_of_a_step_that_a_straggler_takes_longer(tmp_path: Path) -> None:
    """From the interval on in which it becomes slow; nobody waits where no rank is slow, nor for a save."""
    found = list(waits(simulated(tmp_path, slow={3: ("own_s", 3.0)}, after=100.0)))
    before = [one for one in found if one.end <= BEGAN + 100]
    after = [one for one in found if one.begin >= BEGAN + 102]
    assert not before
    assert after and all(one.share == pytest.approx(2 / 3, rel=0.1) for one in after)
    saving = simulated(tmp_path / "saving", slow={0: ("save_s", 900.0)})
    assert list(waits(saving)) == []
