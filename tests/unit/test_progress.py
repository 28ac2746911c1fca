"""The progress of a run that trains: lines in logs, and one line on a terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from clusterddp.jobdef.job import Job
from clusterddp.rundir.progress import Recent, main_metric, recent
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.runs.progress_display import Progress, Shown
from clusterddp.training import context
from clusterddp.training.context import ProgressLines
from clusterddp.worker.rank_exit import Loop
from clusterddp.worker.rank_process import RankProcess
from tests.histories import happened
from tests.runs_on_disk import BEGAN, event, recorded_run, started, steps, write_lines
from tests.terminal import Terminal
from tests.wording import says


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
def lines(tmp_path: Path, process: RankProcess) -> Iterator[ProgressLines]:
    """Of attempt 1, in a loop of 100 steps of which 10 are done."""
    path = tmp_path / "metrics.jsonl"
    write_lines(path, steps(range(10), 1, loss=0.5))
    process.training.loop = Loop(lambda: 10, 100)
    lines = ProgressLines(process.training, path, 1, 3600.0)
    yield lines
    lines.close()


def test_rank_0_prints_a_line_only_after_new_steps_of_its_loop(
    lines: ProgressLines, tmp_path: Path, process: RankProcess
) -> None:
    """Not during an evaluation, after a break, or about the attempt before."""
    assert lines.line() == "step 10/100, 2 steps/s, 45 s left, loss 0.5"
    assert lines.line() is None
    write_lines(tmp_path / "metrics.jsonl", steps(range(11), 1))
    assert lines.line() == "step 11/100, 2 steps/s, 44 s left"
    write_lines(tmp_path / "metrics.jsonl", steps(range(12), 0))
    assert lines.line() is None
    write_lines(tmp_path / "metrics.jsonl", steps(range(13), 1))
    process.training.complete_loop()
    assert lines.line() is None


@pytest.mark.usefixtures("capsys")
def test_rank_0_prints_no_lines_beside_a_bar_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on a terminal."""
    tqdm = pytest.importorskip("tqdm")
    assert not context.has_own_display()
    with tqdm.tqdm(total=3):
        assert context.has_own_display()
    assert not context.has_own_display()
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: True))
    assert context.has_own_display()


def test_a_waiting_command_prints_a_line_where_there_is_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only of new steps, and none after the sentence about the run's end."""
    run = recorded_run(tmp_path / "net", [event("training", step=0)])
    shown = Progress(run, 100, every_s=0.0)
    silent = [Progress(run, 100), Progress(run, 100, 0.0, Shown(progress=False))]
    write_lines(run.metrics_file, steps(range(10), loss=0.5))
    for one in (shown, shown, *silent):
        one.update()
    says(capsys.readouterr().err)


def test_what_the_supervisor_prints_comes_below_all_that_rank_0_printed_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A progress bar is its newest state. The box comes before the sentence about the attempt's end."""
    run = recorded_run(tmp_path / "net")
    shown = Progress(run, None, shown=Shown(failures=False))
    assert run.create_attempt() == 0
    out, err = (run.attempt_logs(0) / f"rank-0.{kind}" for kind in ("out", "err"))

    def written(path: Path, text: str) -> list[str]:
        with open(path, "a", newline="") as file:
            file.write(text)
        shown.update()
        return capsys.readouterr().err.splitlines()

    happened(run, {"time": BEGAN, **started()})
    assert written(out, "begins\nhalf a")[1:] == ["begins"]
    assert written(err, "a warning\n\r 10%\r 20%") == ["a warning"]
    assert written(out, " line\r\n") == ["half a line"]
    assert written(err, "\r 90%\r") == [] and written(err, "100%\n") == ["100%"]
    reading, writing = (os.fdopen(end, mode) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
    with reading, writing:
        shown.follow(reading)
        writing.write(b"a warning of the supervisor\n| the b")
        writing.flush()
        assert written(err, "Traceback\n") == ["Traceback", "a warning of the supervisor"]
        writing.write(b"ox\n")
        writing.flush()
        happened(run, {"time": BEGAN + 1, "attempt": 0, "event": "failed", "attempts": 1, "step": 1, "reason": "gone"})
        assert written(err, "ValueError: no\nthe last words")[:3] == ["ValueError: no", "the last words", "| the box"]


def test_a_run_without_its_job_definition_does_not_end_the_command_and_shows_no_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command may be the loop of a local run. Without the definition, nobody knows what to mask."""
    run = recorded_run(tmp_path / "net")
    shown = Progress(run, None)
    run.create_attempt()
    (run.attempt_logs(0) / "rank-0.out").write_text("my key is s3cret-value\n")
    run.job_file.unlink()
    happened(run, {"time": BEGAN, **started()})
    shown.update()
    shown.update()
    says(capsys.readouterr().err)


@pytest.mark.parametrize(("launcher", "prints"), [("slurm", True), ("local", False)])
def test_rank_0_prints_lines_unless_the_command_of_a_local_run_does(
    tmp_path: Path, launcher: str, prints: bool
) -> None:
    process = RankProcess(cast(Any, object()))
    job, ranks = Job(name="net", module="net"), SimpleNamespace(rank=0, launcher=launcher)
    settings: Any = SimpleNamespace(run_dir=RunDirectory(tmp_path), job=job, ranks=ranks)
    lines = context.begin(process, settings, 0)
    assert (lines is not None) is prints
    if lines is not None:
        lines.close()


def test_the_loss_is_shown_first_unless_another_metric_is_named() -> None:
    """Else what has loss in its name, else the first metric."""
    assert main_metric({"step": 1, "acc": 1, "train_loss": 1, "loss": 1}) == "loss"
    assert main_metric({"step": 1, "acc": 1, "Loss/train": 1}) == "Loss/train"
    assert main_metric({"step": 1, "time": 1, "attempt": 0, "acc": 1}) == "acc"
    assert main_metric({"step": 1}) is None


PROGRAM = """
import sys
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.runs.progress_display import Progress
with Progress(RunDirectory(sys.argv[1]), 5000) as shown:
    for line in sys.stdin:
        shown._line_at = 0.0
        shown.update()
        print("updated", file=sys.stderr)
"""


def test_on_a_terminal_the_progress_is_one_line_below_the_output(tmp_path: Path) -> None:
    """It is cut at the terminal's width, and gone in the end. The output is as the script wrote it."""
    run = recorded_run(tmp_path / "net", [event("training", step=0)])
    environment = {**os.environ, "COLUMNS": "40", "TERM": "xterm"}
    words = [sys.executable, "-c", PROGRAM, str(run)]
    terminal = Terminal(lambda **options: subprocess.Popen(words, env=environment, **options))
    try:
        terminal.type("\n")
        terminal.wait_for("updated")
        write_lines(run.metrics_file, steps(range(1190, 1200), loss=0.41234, lr=0.001, acc=0.9))
        terminal.type("\n")
        before = terminal.wait_for("updated")
        (line,) = re.findall(r"step 1200/5000[^\r\n\x1b]*", before)
        assert len(line) == 40 and line.startswith("step 1200/5000, 2 steps/s, 32 min left"), line
        assert "acc" not in before
        happened(run, {"time": BEGAN, **started()})
        printed = f"the :fire: of lr:1e-3:{' and' * 20} [bold]more[/bold]"
        (run.attempt_logs(0) / "rank-0.out").write_text(f"{printed}\n")
        terminal.type("\n")
        shown = terminal.wait_for("updated")
        assert printed in shown, "as the script wrote it, and not in the terminal's width"
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0
        after = terminal.wait_for("\x1b[2K")
        assert "step 1200/5000" in after, "below the output of others"
    finally:
        terminal.end()
