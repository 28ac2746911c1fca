"""``make bench-compare``: which rows it flags, and that each side imports its own clusterddp."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common, compare
from benchmarks.measuring import Benchmark
from tests.wording import raises

MEASURES = """
import json, pathlib, sys
import clusterddp
seconds = json.loads(pathlib.Path(clusterddp.__file__).with_name("seconds.json").read_text())
folder = pathlib.Path(sys.argv[3])
folder.mkdir()
row = {"row": "step", "unit": "s", "limit": 1.0, "limit_is": "a clock", "allowed": None, "met": None}
row.update(dict.fromkeys(["ours", "ratio", "low", "high"], seconds))
folder.joinpath("rows.json").write_text(json.dumps({"rows": [row]}))
"""


def side(folder: Path, seconds: float) -> compare.Side:
    """A package that takes so many seconds, and a benchmark that says so."""
    (folder / "clusterddp").mkdir(parents=True)
    (folder / "clusterddp" / "__init__.py").touch()
    (folder / "clusterddp" / "seconds.json").write_text(str(seconds))
    (folder / "measures.py").write_text(MEASURES)
    return compare.Side(folder.name, folder)


@pytest.mark.parametrize(
    ("after", "verdict"), [(1.3, compare.SLOWER), (1.05, compare.NOT_SLOWER), (0.7, compare.NOT_SLOWER)]
)
def test_the_sides_are_measured_in_turns_and_a_loss_of_more_than_a_tenth_is_flagged(
    tmp_path: Path, after: float, verdict: str, capfd: pytest.CaptureFixture[str]
) -> None:
    sides = (side(tmp_path / "before", 1.0), side(tmp_path / "after", after))
    pairs = compare.alternating(sides, [Benchmark("mine", "measures")], 2)
    words = [line.rpartition(" ")[2] for line in capfd.readouterr().err.splitlines()]
    assert words == ["before", "after", "after", "before"]
    found = compare.losses(pairs)
    assert found == {"step": [after, after]}
    table, slower, failed = compare.described(found, sides)
    assert (slower, failed) == (verdict == compare.SLOWER, False) and verdict in table


def test_noise_alone_is_not_flagged_and_a_bar_within_the_interval_cannot_be_told() -> None:
    generator = random.Random(1)
    for _ in range(200):
        noise = [generator.lognormvariate(0, 0.05) for _ in range(4)]
        assert compare.judged(noise)[0] != compare.SLOWER
    assert compare.judged([1.0, 1.05, 1.15, 1.2])[0] == compare.CANNOT_TELL
    assert compare.judged([1.395, 1.502])[0] == compare.CANNOT_TELL
    assert compare.judged([1.5])[0] == compare.CANNOT_TELL


@pytest.mark.parametrize("number", [2, 3, 4, 5])
def test_the_interval_of_a_row_contains_its_median_in_95_percent_of_all_cases(number: int) -> None:
    """Also of a few pairs, whose smallest and largest value are an interval of much less."""
    generator = random.Random(number)
    held = 0
    for _ in range(1000):
        low, high = common.median_interval([generator.gauss(1.0, 0.3) for _ in range(number)])
        held += low <= 1.0 <= high
    assert held >= 930


def test_a_rate_that_falls_is_a_loss() -> None:
    row: dict[str, Any] = {"unit": "samples/s", "ratio": 1.0}
    assert compare.loss(row, {**row, "ratio": 0.5}) == 2.0
    assert compare.loss({**row, "unit": "ms"}, {**row, "ratio": 0.5}) == 0.5


def test_a_row_that_failed_or_is_on_one_side_only_is_told() -> None:
    row: dict[str, Any] = {"row": "step", "unit": "s", "ratio": 1.0}
    pairs: list[Any] = [[{"step": row, "saves": {"row": "saves", "failed": "no disk"}}, {"step": row, "new": row}]]
    found = compare.losses(pairs)
    assert found == {"step": [1.0], "saves": "failed: no disk", "new": "only one of the two has this row"}
    table, slower, failed = compare.described(found, (compare.Side("a", Path()), compare.Side("b", Path())))
    assert not slower and failed and "failed: no disk" in table


def test_a_side_whose_clusterddp_is_another_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise both would be the same, and nothing slower."""
    compare.check_import(side(tmp_path / "right", 1.0))
    (tmp_path / "empty" / "clusterddp").mkdir(parents=True)
    wrong = compare.Side("wrong", tmp_path / "empty")
    monkeypatch.setattr(compare, "environment", lambda _: {"PYTHONPATH": str(tmp_path / "right")})
    with raises(SystemExit):
        compare.check_import(wrong)
