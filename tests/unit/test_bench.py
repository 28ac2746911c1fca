"""The common table of the benchmarks: what a row holds, and that a benchmark that fails is a row, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as bench
from benchmarks import page, report, rows

GOOD = rows.paired("a copy", "ms", [12.0, 12.2, 11.9], [10.0, 10.1, 10.0], "memory copy", allowed=1.3).as_json()
WRITES = """
import json, pathlib, sys
assert sys.argv[1:3] == ["--quick", "--out"]
folder = pathlib.Path(sys.argv[3])
folder.mkdir()
folder.joinpath("NAME.json").write_text(json.dumps({"rows": ROWS}))
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules the benchmarks' processes find."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def rows_of(modules: Path, code: str, seconds: float = 60) -> list[dict[str, Any]]:
    (modules / "measures.py").write_text(code)
    return bench.measured(bench.Benchmark("mine", "measures"), seconds)[0]


def test_rows_of_a_benchmark_are_gathered_with_its_name(modules: Path) -> None:
    found = rows_of(modules, WRITES.replace("ROWS", repr([GOOD])))
    assert found == [{"benchmark": "mine", **GOOD}]
    assert rows.cells(found[0]) == [
        "a copy",
        "12.0 ms",
        "10.0 ms (memory copy)",
        "1.20 (1.19 to 1.21)",
        "at most 1.30",
        "yes",
    ]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise SystemExit('no cluster here')", "exit code 1: no cluster here"),
        ("", "wrote no rows"),
        (WRITES.replace("ROWS", "[]"), "wrote no rows"),
    ],
)
def test_a_benchmark_without_good_rows_is_a_row_with_the_reason(modules: Path, code: str, reason: str) -> None:
    (row,) = rows_of(modules, code)
    assert row["row"] == "mine" and reason in row["failed"]
    assert "**failed: " in rows.table([row])


def test_a_row_without_a_finite_figure_is_an_error() -> None:
    with pytest.raises(ValueError, match="row 'a copy': ours, limit, ratio, low and high must be finite"):
        rows.counted("a copy", "ms", float("nan"), 1.0, "memory copy")


def test_a_module_that_does_not_exist_is_a_row(modules: Path) -> None:
    (row,), _ = bench.measured(bench.Benchmark("absent", "benchmarks.absent"), 60)
    assert row["failed"] == "exit code 1: No module named benchmarks.absent"


def test_a_benchmark_that_takes_too_long_is_ended_and_is_a_row(modules: Path) -> None:
    (row,) = rows_of(modules, "import signal\nsignal.pause()", 0.5)
    assert row["failed"].startswith("took more than")


def test_benchmarks_for_which_no_time_is_left_are_rows(modules: Path) -> None:
    found, seconds = bench.all_measured([bench.Benchmark("late", "measures")], 0.0)
    assert "not begun" in found[0]["failed"] and not seconds


def test_a_bar_within_the_interval_is_neither_met_nor_missed() -> None:
    ours, limit = [9.0, 10.0, 11.0, 10.0], [10.0] * 4
    met = [rows.paired("row", "s", ours, limit, "limit", allowed=bar).met for bar in (0.8, 1.0, 1.2, None)]
    assert met == [False, None, True, None]
    undecided = rows.paired("row", "s", ours, limit, "limit", allowed=1.0).as_json()
    assert rows.cells(undecided)[-1] == "cannot tell"
    assert rows.paired("row", "s", ours, limit, "limit", more=5.0).allowed == 1.5
    assert rows.unpaired("row", "s", ours, limit, "limit").low < 1.0


def test_a_row_comes_from_its_own_benchmark_before_it_comes_from_the_common_run(tmp_path: Path) -> None:
    chosen = {**GOOD, "row": page.HEADLINES[0], "allowed": 1.0, "met": False}
    late = rows.failed("saves", "no | disk\nleft")
    (tmp_path / "bench.json").write_text(json.dumps({"rows": [{**chosen, "ours": 7.0, "benchmark": "mine"}, late]}))
    report.write(tmp_path, "steady-state", "# A title\n\nA sentence.", report.Found({}, [chosen]))
    made = page.tables(page.gathered(tmp_path), "results")
    assert "| 12.0 ms |" in made["figures"] and "**failed: no / disk left**" in made["figures"]
    assert f"| {chosen['row']} | 12.0 ms |" in made["missed"] and "7.00" not in "".join(made.values())
    assert "| [steady-state](results/steady-state.md) | 1 | 0 | 1 | 0 |" in made["bars"]


def test_a_table_is_replaced_and_the_text_around_it_stays(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text("Before.\n<!-- some: make it -->\nold\n<!-- end of some -->\nAfter.\n")
    for _ in range(2):
        report.fill(file, {"some": "| new |", "other": "| absent |"})
    assert file.read_text() == "Before.\n<!-- some: make it -->\n\n| new |\n\n<!-- end of some -->\nAfter.\n"


@pytest.mark.parametrize(("value", "text"), [(0.01234, "0.0123"), (1.018, "1.02"), (35.06, "35.1"), (1240.4, "1240")])
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert rows.number(value) == text


def test_only_known_benchmarks_are_chosen() -> None:
    assert [one.name for one in bench.choose("saves,orders")] == ["saves", "orders"]
    with pytest.raises(SystemExit, match="no benchmark nonsense; available: "):
        bench.choose("saves,nonsense")


def test_rows_are_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text(json.dumps({"figures": []}))
    assert rows.read(tmp_path / "old.json") == []
