"""Histories of the protocol, each repeatable by its seed. More of them: `make simulate`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulation import product
from tests.simulation.history import Fault, drawn, play, shrunk
from tests.simulation.mutants import FOUND_AFTER, MUTANTS, found_after

#: `make simulate` plays these, and many more.
HISTORIES = 80
#: Seeds that showed mistakes in the product. A change of what is drawn empties this list, as they then play other ones.
FOUND: tuple[int, ...] = (
    *(30_838, 101_186, 1416, 2124, 5_000_480, 6_000_368, 10_017_922, 200_003_609),
    *(2_009_161, 2_027_330, 2_107_273, 2_177_243, 3_131_228, 3_136_771, 3_162_497, 3_184_251, 3_211_189),
    *(20_392_991, 20_414_279, 20_420_625, 20_507_111, 30_005_019, 40_468_686),
    *(50_516_861, 50_726_427, 50_768_776, 50_986_776),
    *(5_016_340, 5_056_128, 5_119_291, 5_198_976, 7_282_249, 4_088_797),
    *(70_017_335, 70_018_364, 80_007_884, 80_008_072, 81_018_065, 84_079_875, 86_009_596),
)
#: Mutants that few histories find. Ten times as many are played here: after a change of the product, others find them.
QUICKLY_FOUND, TRIES = [name for name, number in FOUND_AFTER.items() if number <= 160], 1600


@pytest.fixture
def simulated() -> Iterator[None]:
    """The product runs in simulated worlds."""
    with product.installed():
        yield


@pytest.mark.usefixtures("simulated")
def test_no_history_violates_an_invariant() -> None:
    """A failing seed is told by `python -m tests.simulation --tell --shrink --seed N`."""
    results = [play(seed) for seed in (*range(HISTORIES), *FOUND)]
    assert [(result.plan.seed, result.violations) for result in results if result.violations] == []
    assert sorted(result.events for result in results)[len(results) // 2] >= 200
    assert {result.ended for result in results} >= {"completed", "cancelled", "failed"}


def test_a_seed_repeats_a_history_exactly() -> None:
    """Also in another process, where sets have another order, and after other histories."""
    command = [sys.executable, "-m", "tests.simulation", "--tell", "--seed", "3"]
    folder = Path(__file__).resolve().parents[2]
    told = [
        subprocess.run(
            command, cwd=folder, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=False
        ).stdout
        for seed in ("1", "2")
    ]
    assert told[0] == told[1] and len(told[0].splitlines()) > 20
    with product.installed():
        play(4)
        assert "\n".join(play(3, traced=True).story) in told[0]


@pytest.mark.parametrize("name", QUICKLY_FOUND)
def test_a_mistake_in_the_product_is_found(name: str) -> None:
    """The others: `make simulate SIMULATE=--mutants`."""
    assert found_after(name, 0, TRIES) is not None, MUTANTS[name].__doc__


@pytest.mark.parametrize("name", MUTANTS)
def test_what_a_mistake_replaces_exists(name: str) -> None:
    """Also of the ones that are not tried here, which a new name would disarm unnoticed."""
    assert [attribute for owner, attribute, _ in MUTANTS[name]() if not hasattr(owner, attribute)] == []


@pytest.mark.usefixtures("simulated")
def test_a_violation_is_shrunk_to_the_faults_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A completed run that a user submits again trains again, if nobody looks at the outcome: one fault of several."""
    patches = MUTANTS["preempted is done"]()
    for owner, name, by in patches:
        monkeypatch.setattr(owner, name, by)
    seed = next(seed for seed in range(200) if play(seed).violations)
    assert len(drawn(seed).faults) > 1
    less = shrunk(drawn(seed))
    assert {fault.kind for fault in less.faults} == {"preempt"}
    assert all(isinstance(fault, Fault) for fault in less.faults)
