"""The progress of a run that trains: lines in logs, and the bar on a terminal."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from clusterddp.rundir.progress import Recent, recent
from clusterddp.runs import progress_display
from clusterddp.runs.progress_display import Progress, Shown
from clusterddp.training import context
from clusterddp.training.context import ProgressLines
from clusterddp.worker import rank_exit
from tests.runs_on_disk import event, recorded_run, steps, write_lines


def test_a_line_has_the_step_the_speed_the_time_left_and_three_metrics() -> None:
    """The loss first; what is unknown is left out."""
    values = {"lr": 0.001, "loss": 0.41236, "acc": float("nan"), "epoch": 3}
    found = Recent(0, 1200, values, 0.5)
    assert found.line(5000) == "step 1200/5000, 2 steps/s, 32 min left, loss 0.4124, lr 0.001, acc nan"
    assert Recent(0, 1200, {}, 3.0).line(None) == "step 1200, 3 s/step"
    assert Recent(0, 1, {}, None).line(5) == "step 1/5"


def test_the_newest_metrics_are_those_of_the_newest_step_that_logged_any(tmp_path: Path) -> None:
    """The speed is the newest attempt's."""
    path = tmp_path / "metrics.jsonl"
    assert recent(path) is None
    write_lines(path, [*steps(range(50), loss=9.0), *steps(range(40, 60), 1, 2.0, loss=1.0), *steps([60, 61], 1, 2.0)])
    assert recent(path) == Recent(1, 62, {"loss": 1.0}, 2.0)


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProgressLines]:
    """Of attempt 1, in a loop of 100 steps of which 10 are done."""
    path = tmp_path / "metrics.jsonl"
    write_lines(path, steps(range(10), 1, loss=0.5))
    monkeypatch.setattr(rank_exit, "loop", rank_exit.Loop(lambda: 10, 100))
    lines = ProgressLines(path, 1, 3600.0)
    yield lines
    lines.close()


def test_rank_0_prints_a_line_only_after_new_steps_of_its_loop(
    lines: ProgressLines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not during an evaluation, after a break, or about the attempt before."""
    assert lines.line() == "step 10/100, 2 steps/s, 45 s left, loss 0.5"
    assert lines.line() is None
    write_lines(tmp_path / "metrics.jsonl", steps(range(11), 1))
    assert lines.line() == "step 11/100, 2 steps/s, 44 s left"
    write_lines(tmp_path / "metrics.jsonl", steps(range(12), 0))
    assert lines.line() is None
    write_lines(tmp_path / "metrics.jsonl", steps(range(13), 1))
    monkeypatch.setattr(rank_exit, "loop", None)
    assert lines.line() is None


def test_rank_0_prints_no_lines_beside_a_bar_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on a terminal."""
    tqdm = pytest.importorskip("tqdm")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not context._own_display()
    with tqdm.tqdm(total=3):
        assert context._own_display()
    assert not context._own_display()
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: True))
    assert context._own_display()


def test_a_waiting_command_prints_a_line_where_there_is_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only of new steps, and none after the sentence about the run's end."""
    run = recorded_run(tmp_path / "net", [event("training", step=0)])
    shown = Progress(run, 100, every_s=0.0)
    silent = [Progress(run, 100), Progress(run, 100, 0.0, Shown(bar=False))]
    write_lines(run.metrics_file, steps(range(10), loss=0.5))
    for one in (shown, shown, *silent):
        one.update()
    assert capsys.readouterr().err == "step 10/100, 2 steps/s, 45 s left, loss 0.5\n"


@pytest.mark.parametrize(("width", "last"), [(120, "acc 0.9"), (60, "..."), (30, "...")])
def test_the_bar_fits_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int, last: str) -> None:
    """On one line: the words are clipped."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "dumb")
    run = recorded_run(tmp_path / "net", [event("training", step=0)])
    with Progress(run, 5000) as shown:
        shown._bar = bar = progress_display._bar()
        shown._task, shown._every_s = bar.add_task("", total=5000, words=""), 0.0
        write_lines(run.metrics_file, steps(range(1190, 1200), loss=0.41234, lr=0.001, acc=0.9))
        shown.update()
        with bar.console.capture() as captured:
            bar.console.print(bar.get_renderable())
    line = captured.get().strip()
    assert "\n" not in line and len(line) <= width and "1200/5000" in line and line.endswith(last)
