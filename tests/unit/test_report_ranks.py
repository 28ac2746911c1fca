"""What ranks did over time: timing.jsonl as a matrix, which ranks were slow, and the heat map."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from clusterddp.report.page import ranks_over_time as section
from clusterddp.report.ranks import PARTS, ROWS, ranks_over_time
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.rundir.timing import PHASES, TimedInterval, read_timings
from tests.runs_on_disk import BEGAN, write_lines

STEPS = 10


def interval(begin: float, end: float, own_s: list[Any], attempt: int = 0, **phases: Any) -> dict[str, Any]:
    """A line of STEPS steps; ``own_s``: of one step, by rank. Other phases are unknown."""
    times = {"begin": BEGAN + begin, "end": BEGAN + end}
    own = [None if value is None else STEPS * value for value in own_s]
    unknown = {phase: [None] * len(own) for phase in PHASES}
    return {"attempt": attempt, **times, "steps": [STEPS] * len(own), **unknown, "own_s": own, **phases}


def hosts(*names: str, attempt: int = 0) -> dict[str, Any]:
    return {"attempt": attempt, "hosts": list(names)}


def read(folder: Path, *lines: dict[str, Any]) -> Sequence[TimedInterval]:
    run = RunDirectory(folder)
    write_lines(run.timing_file, lines)
    return read_timings(run).intervals


def data(folder: Path, *lines: dict[str, Any], until: float = 100.0, parts: int = 10) -> dict[str, Any]:
    found = ranks_over_time(read(folder, *lines), (BEGAN, BEGAN + until), parts)
    assert found is not None
    return found


def test_a_slow_rank_stands_out_where_and_while_it_is_slow(tmp_path: Path) -> None:
    """The others wait for it half of each step, from the middle on: a fourth of the time."""
    lines = [hosts("n1", "n1", "n2"), interval(0, 50, [0.1, 0.1, 0.1]), interval(50, 100, [0.1, 0.1, 0.2])]
    lines[2]["wait_s"] = [1.0, 1.0, 0.0]
    found = data(tmp_path, *lines)
    assert [(row["host"], row["ranks"]) for row in found["rows"]] == [("n1", [0]), ("n1", [1]), ("n2", [2])]
    assert found["rows"][2]["excess"] == [0] * 5 + [0.5] * 5
    assert found["rows"][0]["excess"] == [0] * 10
    assert found["rows"][2]["own_s"] == [0.1] * 5 + [0.2] * 5
    assert found["median"]["wait_s"] == [None] * 5 + [0.1] * 5
    (slow,) = found["slow"]
    assert (slow["rank"], slow["host"], slow["phase"], slow["slow_s"]) == (2, "n2", "own_s", 50)
    assert (slow["work_s"], slow["median_s"], slow["excess"]) == (0.2, 0.1, 0.25)


def test_a_rank_that_waits_for_its_batches_is_slow_too(tmp_path: Path) -> None:
    """And the phase tells them apart."""
    lines = interval(0, 100, [0.1, 0.1], data_s=[0.0, STEPS * 0.3])
    (slow,) = data(tmp_path, hosts("n1", "n1"), lines)["slow"]
    assert (slow["rank"], slow["phase"], slow["work_s"]) == (1, "data_s", 0.4)


def test_time_without_steps_is_empty(tmp_path: Path) -> None:
    """An interval is in each part that it lies in, by its share; between attempts there is nothing."""
    lines = [interval(5, 20, [0.1, 0.1]), interval(60, 100, [0.3, 0.3], 1)]
    found = data(tmp_path, hosts("n1", "n1"), hosts("n1", "n1", attempt=1), *lines)
    assert found["rows"][0]["own_s"] == [0.1, 0.1, None, None, None, None, 0.3, 0.3, 0.3, 0.3]
    assert found["slow"] == []


def test_a_rank_on_another_host_after_a_restart_is_another_row(tmp_path: Path) -> None:
    """Nodes are what one wants to find."""
    lines = [hosts("n1", "n2"), interval(0, 50, [0.1, 0.2]), hosts("n1", "n3", attempt=1)]
    found = data(tmp_path, *lines, interval(50, 100, [0.1, 0.1], 1))
    rows = {(row["host"], *row["ranks"]): row["excess"] for row in found["rows"]}
    assert rows["n2", 1] == [0.5] * 5 + [None] * 5
    assert rows["n3", 1] == [None] * 5 + [0] * 5


def test_of_many_ranks_each_host_has_a_row_with_its_slowest(tmp_path: Path) -> None:
    """And of many hosts those that are slow."""
    ranks = ROWS + 6
    names = [f"n{rank // 2}" for rank in range(ranks)]
    own = [0.2 if rank == 9 else 0.1 for rank in range(ranks)]
    rows = data(tmp_path, hosts(*names), interval(0, 100, own))["rows"]
    assert len(rows) == ranks // 2
    assert [row["host"] for row in rows if row["excess"][0] > 0] == ["n4"]
    names = [f"n{rank}" for rank in range(3 * ROWS)]
    rows = data(tmp_path, hosts(*names), interval(0, 100, [*own, *[0.1] * (3 * ROWS - ranks)]))["rows"]
    assert len(rows) == ROWS
    assert rows[9]["excess"] == [0.5] * 10 and rows[-1]["host"] is None and len(rows[-1]["ranks"]) == 2 * ROWS + 1


def test_what_is_not_known_stays_unknown(tmp_path: Path) -> None:
    """A rank without times has a row, but is not compared; a host that is not recorded has no name."""
    found = data(tmp_path, interval(0, 100, [0.1, None, 0.1]))
    assert found["rows"][1]["excess"] == [None] * 10 == found["rows"][1]["own_s"]
    assert {row["host"] for row in found["rows"]} == {""}
    assert data(tmp_path, interval(0, 100, [0.1]))["rows"][0]["excess"] == [None] * 10
    assert ranks_over_time(()) is None


@pytest.mark.parametrize(
    "line",
    [
        interval(9, 0, [0.1]),
        interval(0, 9, [0.1]) | {"own_s": [1, 2]},
        interval(0, 9, [0.1]) | {"own_s": [float("nan")]},
        interval(0, 9, [0.1]) | {"own_s": ["1"]},
        interval(0, 9, [0.1]) | {"steps": [-1]},
        {"attempt": 0, "begin": 5, "steps": [1]},
        {"attempt": 0, "hosts": [1]},
        {"hosts": ["n1"]},
        [],
    ],
)
def test_a_line_of_another_program_is_left_out_and_counted(tmp_path: Path, line: Any) -> None:
    """The lines around it are read."""
    run = RunDirectory(tmp_path)
    good = json.dumps(interval(0, 9, [0.1, 0.1]))
    run.timing_file.write_text(f'{good}\n{json.dumps(line)}\n{{"attempt": 0, "news": 1}}\n{good}\n{good[:-9]}')
    found = read_timings(run)
    assert found.skipped == 1
    assert len(found.intervals) == 2


def test_the_map_shows_hosts_and_names_the_slow_rank(tmp_path: Path) -> None:
    """A drawing per host; a sentence about the rank for which the others wait."""
    lines = [hosts("n1", "n1", "<n2>"), interval(0, 100, [0.1, 0.1, 0.2])]
    part = section({"ranks": data(tmp_path, *lines), "began": BEGAN})
    assert part is not None
    assert part.body.count('role="img"') == 3  # two hosts, and the phases
    assert 'aria-label="&lt;n2&gt;, rank 2: at most 50% of a step"' in part.body
    assert "<b>Rank 2 on &lt;n2&gt;</b>: 200 ms per step instead of 100 ms" in part.body
    alone = section({"ranks": data(tmp_path, interval(0, 100, [0.1])), "began": BEGAN})
    assert alone is not None and "median rank" not in alone.body


def test_the_map_is_bounded(tmp_path: Path) -> None:
    """Of ranks whose level changes in each part of the time."""
    within = (BEGAN, BEGAN + PARTS)
    lines = [
        interval(part, part + 1, [0.1 * (1 + (rank + part) % 5 / 4) for rank in range(ROWS)]) for part in range(PARTS)
    ]
    found = ranks_over_time(read(tmp_path, *lines), within)
    part = section({"ranks": found, "began": BEGAN})
    assert part is not None and len(part.body) < 180_000
    assert set(found["rows"][0]) == {"host", "ranks", "excess", *PHASES} if found else None
