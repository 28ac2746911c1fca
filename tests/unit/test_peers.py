"""benchmarks/peers: what a step log says about a cell, which lines count, and that no cell is measured twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.__main__ import Queue, Results, main, plan
from benchmarks.peers.cells import Line, bound, ettr, figures, gaps, parse
from benchmarks.peers.peers import LIMIT, PEERS, count
from benchmarks.peers.schedules import CELL_S, OF_THE_LIMIT, SCHEDULES
from benchmarks.peers.summary import Matrix, everything, leads, still_training

#: Steps 0 to 3 by one process, interrupted after 13; a checkpoint at 2, and a restart that makes 2 and 3 again.
INTERRUPTED = [Line(10 + n, n, 1) for n in range(4)] + [Line(20 + n, 2 + n, 2) for n in range(4)]


def cell(
    peer: str = "clusterddp", schedule: str = "preempt", lines: list[Line] = INTERRUPTED, **more: Any
) -> dict[str, Any]:
    """A cell as the injector notes it, with its figures."""
    fault = {"kind": "preempt", "asked": 12.5, "made": True, "job": "1"}
    noted = {
        "peer": peer, "schedule": schedule, "repetition": 0, "submitted": 8.0,
        "finished": lines[-1].time, "end": "completed",
        "faults": [fault] if "preempt" in schedule else [], "handovers": [], "states": [], "slurm": "COMPLETED 0:0",
        "load": "1", "final": None, **more,
    }  # fmt: skip
    return figures(noted, lines)


def test_a_torn_last_line_is_no_step() -> None:
    """A rank is killed while it writes."""
    assert parse("1.5 0 7\n2.5 1 7\n3.5 2") == [Line(1.5, 0, 7), Line(2.5, 1, 7)]
    assert parse("") == []


def test_an_interruption_costs_its_repeated_steps_and_the_time_to_the_next_new_one() -> None:
    """Steps 2 and 3 are made twice; step 4, the first new one, ends at 22; the last before it at 13."""
    found = cell()
    assert (found["repeated"], found["reached"], found["processes"]) == (2, 6, 2)
    assert found["faults"][0]["first_new_s"] == 22 - 12.5
    assert found["gaps_s"][0] == 22 - 13
    assert (found["wall_s"], found["start_s"], found["step_s"]) == (15.0, 2.0, 1.0)


def test_a_fault_that_nothing_followed_has_no_first_new_step() -> None:
    """Steps of the processes that the fault met, such as those within a grace, are none."""
    found = cell(lines=INTERRUPTED[:4], finished=None)
    assert found["faults"][0]["first_new_s"] is None and found["wall_s"] is None and gaps(INTERRUPTED[:4]) == []


def test_a_run_that_still_makes_new_steps_when_its_time_is_over_is_slow_and_not_lost() -> None:
    """As under preemptions in short succession; one that hangs has made none for a long time."""
    late = [Line(8.0 + CELL_S - 10 + n, n, 1) for n in range(4)]
    assert still_training(cell("torchrun", lines=late, finished=None, end="not done after 345 s"))
    assert not still_training(cell("torchrun", finished=None, end="not done after 345 s"))
    assert not still_training(cell("torchrun", lines=late, finished=None, end="no job left"))


def test_the_bound_loses_the_start_and_each_interruption() -> None:
    """100 s of steps, 5 s to start, 3 interruptions of 10 s each, half an interval of 4 s where there is no notice."""
    assert ettr(1000, 0.1, 200) == pytest.approx(0.5)
    assert bound(1000, 0.1, 5, 10, 3) == pytest.approx(100 / 135)
    assert bound(1000, 0.1, 5, 10, 3, repeated_s=4) == pytest.approx(100 / 147)


def test_lines_are_counted_without_comments_docstrings_and_the_benchmark() -> None:
    """A string that is a value counts on each of its lines."""
    script = '"""Says\nwhat."""\n\n# why\nfrom steplog import steplog\nx = """a\nb"""  # c\n'
    script += 'if x:\n    """d"""\n    steplog(1)\n'
    assert count(script, python=True) == 3
    assert count("#!/bin/bash\n# why\n\n#SBATCH --nodes=2\nsrun x\n", python=False) == 3


def test_each_peer_has_its_scripts_and_names_a_page_of_its_documentation() -> None:
    """The first statement of a script says what it follows."""
    for peer in PEERS.values():
        assert all(lines > 5 for lines in peer.lines().values()), peer.name


def test_a_cell_that_is_measured_is_kept_and_not_planned_again(tmp_path: Path) -> None:
    """Another process reads it from the file; what was torn is measured again."""
    keys = list(plan(2, ["clusterddp", LIMIT.name], list(SCHEDULES)))
    assert len(keys) == 2 * (len(SCHEDULES) + len(OF_THE_LIMIT)) and len(set(keys)) == len(keys)
    final = tmp_path / "final.bin"
    final.write_bytes(b"\0" * 8)
    Results(tmp_path, 6).add(cell(), final)
    with (tmp_path / "cells.jsonl").open("a") as file:
        file.write('{"peer": "limit", "schedu')
    missing = Results(tmp_path, 6).missing(keys)
    assert len(missing) == len(keys) - 1 and ("clusterddp", "preempt", 0) not in missing


def test_no_cell_is_begun_that_may_end_too_late() -> None:
    """A lane gets nothing once the time that is left is less than the longest cell's."""
    key = ("clusterddp", "none", 0)
    assert Queue([key], minutes=1).take() is None
    queue = Queue([key], minutes=60)
    assert queue.take() == key and queue.take() is None


def test_final_values_are_compared_with_the_peers_own_undisturbed_run(tmp_path: Path) -> None:
    """Equal digests are no differing value; else they are counted."""
    for name, content in {"a": b"\0" * 12, "b": b"\0" * 8 + b"\1" * 4}.items():
        (tmp_path / f"{name}.bin").write_bytes(content)
    cells = [cell(schedule="none", final="a"), cell(final="a"), cell(final="b"), cell("torchrun", final="b")]
    matrix = Matrix(cells, tmp_path)
    assert [matrix.differing(one) for one in cells] == [0, 0, 1, None]
    (tmp_path / "b.bin").unlink()
    assert matrix.differing(cells[2]) is None, "values that were not kept are not compared"


def test_the_bar_is_judged_from_three_cells_on(tmp_path: Path) -> None:
    """The limit is ours here, so that it is met; were ours to lose ten seconds more each time, it would not be."""
    slow = [*INTERRUPTED[:4], *(Line(line.time + 10, line.step, 2) for line in INTERRUPTED[4:])]
    for ours, met in ((INTERRUPTED, True), (slow, False)):
        cells = [cell(lines=ours, schedule="preempt-60") for _ in range(3)]
        cells += [cell("limit", "preempt-60"), cell("limit", "none", INTERRUPTED[:4])]
        (row,) = (row for row in Matrix(cells, tmp_path, steps=8).rows() if row.allowed)
        assert row.met is met


def test_ours_is_compared_with_the_best_peer_that_completed_all_its_cells(tmp_path: Path) -> None:
    """Repetition by repetition, in whichever order the cells ended; a peer that lost a cell is no best one."""
    slow = [*INTERRUPTED[:4], *(Line(line.time + 10, line.step, 2) for line in INTERRUPTED[4:])]
    cells = [
        cell(repetition=1),
        cell(repetition=0),
        cell("submitit", repetition=0),
        cell("submitit", lines=slow, repetition=1),
    ]
    cells += [cell(peer, lines=slow, repetition=n) for peer in ("handwritten", "Lightning") for n in range(2)]
    cells += [cell("torchrun", repetition=0), cell("torchrun", finished=None, end="no job left", repetition=1)]
    cells += [
        cell(peer, finished=None, end="no job left", repetition=n) for peer in ("accelerate", "Trainer") for n in (0, 1)
    ]
    matrix = Matrix(cells, tmp_path, steps=6)
    found = leads({(one["peer"], one["schedule"]): one for one in everything(matrix)})
    assert [(schedule, peer) for schedule, _, peer, _, _ in found] == [("preempt", "submitit")]
    ratios = found[0][-1]
    assert ratios[0] == pytest.approx(1) and ratios[1] == pytest.approx(25 / 15)


@pytest.mark.parametrize("option", ["--schedules", "--peers"])
def test_an_unknown_name_is_an_error_and_writes_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr("sys.argv", ["peers", option, "nonsense", "--out", str(tmp_path), "--state", str(tmp_path)])
    with pytest.raises(SystemExit, match="nonsense; available: "):
        main()
    assert not list(tmp_path.iterdir())
