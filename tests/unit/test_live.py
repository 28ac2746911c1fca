"""``--watch``: what fits a terminal, curves from parts of a file, and a real terminal."""

from __future__ import annotations

import fcntl
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from clusterddp.cli import live
from clusterddp.cli.command_line import command
from clusterddp.cli.live import EVENTS, MOST_LINES, Size, composed, fact_lines, labelled, sparkline
from clusterddp.errors import INTERRUPTED, UsageError
from clusterddp.reporter import clipped
from clusterddp.rundir.progress import curve, main_metric
from clusterddp.runs.run_report import moment
from clusterddp.slurm import commands as slurm
from tests.runs_on_disk import BEGAN, event, of_job, recorded_run, started, steps, write_lines

FACTS = [("state", "job 41 (RUNNING on n[1-2])"), ("time", "ETTR 91% of 2 h 05 min so far, goodput 97%")]
HAPPENED = [f"11-22 08:00:0{number}  attempt {number}: started" for number in range(9)]


# --- curves


def test_a_curve_has_a_character_for_each_part_of_the_steps() -> None:
    """The mean of a part, the part before where there is none, and "x" where nothing is finite."""
    assert sparkline([(step, step // 8) for step in range(64)], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([(step, step // 8) for step in range(64)], 8, "ascii") == "_.-=+*#@"
    assert sparkline([(0, 0.0), (1, 1.0)], 40) == "▁█", "no more characters than points"
    assert sparkline([(0, 1.0), (1, 3.0), (90, math.nan), (99, 2.0)], 4) == "▄▄▄▄"
    assert sparkline([(0, 0.0), (50, math.inf), (99, 1.0)], 3) == "▁x█"
    assert sparkline([(0, 1e-3), (1, 1e-2), (2, 1e-1)], 3) == "▁▅█", "logarithmic from a ratio of 30 on"
    assert sparkline([(0, -1e308), (1, 1e308)], 2) == "▁█"


def test_a_curve_is_labelled_with_its_first_and_its_newest_value() -> None:
    """In a given width; where there is no room for a curve, the newest value remains."""
    points = [(step, 2.0 - step / 100) for step in range(101)]
    assert labelled(points, 15) == "2 █▇▇▆▅▄▄▃▂▂▁ 1"
    assert len(labelled(points, 60)) == 60
    assert labelled(points, 7) == "1" == labelled([(7, 1.0)], 60)
    assert labelled([], 60) == ""


def test_the_curve_of_a_large_file_is_read_from_parts_of_it(tmp_path: Path) -> None:
    """Its first and its newest value are exact, and a metric that few steps log is found; so is a torn end."""
    path = tmp_path / "metrics.jsonl"
    rare = [line | ({"acc": 0.5} if line["step"] % 50 == 0 else {}) for line in steps(range(10_000), loss=1.0)]
    write_lines(path, [*steps([0], loss=9.0), *rare[1:-1], *steps([9999], loss=3.0)])
    with open(path, "a") as file:
        file.write('{"step": 10000, "attempt": 0, "loss": 7')
    points = curve(path, "loss", 10)
    assert points[0] == (0, 9.0) and points[-1] == (9999, 3.0) and len(points) == 10 * 8
    assert {round(step, -3) for step, _ in points} >= {0, 2000, 4000, 6000, 8000}
    assert 8 <= len(curve(path, "acc", 10)) <= 30
    assert curve(path, "missing", 10) == curve(tmp_path / "missing", "loss", 10) == []


def test_a_curve_leaves_out_what_a_later_attempt_discarded(tmp_path: Path) -> None:
    """The later attempt began at the step of its event ``resumed``."""
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [*steps(range(8), loss=float("nan")), *steps([4, 5], 1, loss=2.0)])
    events = [event("training", 0, step=0), event("resumed", 1, step=4)]
    assert [step for step, _ in curve(path, "loss", 10, events)] == [0, 1, 2, 3, 4, 5]
    assert [value for step, value in curve(path, "loss", 10, events) if step > 3] == [2.0, 2.0]


def test_the_loss_is_drawn_unless_another_metric_is_named() -> None:
    """Else what has loss in its name, else the first metric."""
    assert main_metric({"step": 1, "acc": 1, "train_loss": 1, "loss": 1}) == "loss"
    assert main_metric({"step": 1, "acc": 1, "Loss/train": 1}) == "Loss/train"
    assert main_metric({"step": 1, "time": 1, "attempt": 0, "acc": 1}) == "acc"
    assert main_metric({"step": 1}) is None


# --- a screen


@pytest.mark.parametrize(("columns", "lines"), [(40, 12), (80, 24), (200, 50), (10, 2)])
def test_a_screen_is_filled_with_the_newest_events_and_never_exceeded(columns: int, lines: int) -> None:
    """Facts are wrapped below their words, and events clipped."""
    shown = composed(fact_lines(FACTS, columns), HAPPENED, "the end", Size(columns, lines)).split("\n")
    assert len(shown) <= lines and max(map(len, shown)) <= columns
    if columns >= 40:
        assert shown[-1] == "the end" and shown[-3].startswith("11-22 08:00:08  attempt 8")
    if columns == 40:
        assert shown[1:3] == ["time      ETTR 91% of 2 h 05 min so far,", "          goodput 97%"]
        assert len(shown) == lines


def test_a_pipe_gets_whole_lines_and_few_events() -> None:
    """Nothing is wrapped or clipped there."""
    shown = composed(fact_lines([("name", "word " * 99)]), HAPPENED, "the end", None).split("\n")
    assert shown == [f"name      {'word ' * 99}", *HAPPENED[-EVENTS:], "the end"]


def test_a_very_long_fact_does_not_push_the_others_off_the_screen() -> None:
    """Such as a hundred metrics."""
    shown = fact_lines([("steps", ", ".join(f"metric{number} 0.5" for number in range(100)))], 80)
    assert len(shown) == MOST_LINES and shown[-1].endswith(" ...")


@pytest.mark.parametrize(
    ("text", "keep_end", "shown"),
    [
        ("runs/net-0", False, "runs..."),
        ("runs/net-0", True, "...et-0"),
        ("日本語日本語", False, "日本..."),  # two columns each
        ("日本語日本語", True, "...本語"),
        ("e\u0301" * 8, False, "e\u0301" * 4 + "..."),
    ],
)
def test_a_text_is_clipped_to_columns_of_a_terminal(text: str, keep_end: bool, shown: str) -> None:
    assert clipped(text, 7, keep_end) == shown


def test_clipping_a_very_long_text_takes_as_long_as_reading_it() -> None:
    """Such as a message with a megabyte of somebody's letters: it took hours."""
    assert clipped("é" * 1_000_000, 80) == "é" * 77 + "..."


# --- the commands


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A running run, with squeue's answer about its job."""
    history = [started(), event("progress", step=0, steps=400, rank=0), event("training", step=0)]
    losses = [line | {"loss": 2.0 - line["step"] / 100, "acc": 0.25} for line in steps(range(101))]
    recorded_run(tmp_path / "runs/net-0", history, holder=of_job(), metrics=losses)
    monkeypatch.setattr(slurm, "run", lambda *_, **__: "41|RUNNING|n[1-2]|2026-11-22T08:00:00|1:00:00|gpu|None\n")
    monkeypatch.setattr(time, "time", lambda: BEGAN + 60)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLUSTERDDP_RUNS", "runs")
    return tmp_path / "runs/net-0"


@pytest.mark.parametrize("words", [["status", "--watch", "runs/net-0", "--show", "acc,loss"], ["list", "--watch"]])
def test_watching_in_a_pipe_prints_a_block_at_each_look(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """Until Ctrl-C, and without control characters."""
    looks: list[int] = []

    def wait() -> None:
        looks.append(1)
        if len(looks) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(live, "wait", wait)
    assert command(words) == INTERRUPTED
    first, second, rest = capsys.readouterr().out.split(" every 5 s until Ctrl-C\n\n")
    assert first.count("\n") == second.count("\n") and rest == ""
    assert "█" in first and "attempt 0: started" in first and "\x1b" not in first
    expected = ["101 of 400", "loss      2 ", "2/s, about 2 min left", "ETTR", "nodes     n[1-2]", "acc       0.25 "]
    of_list = ["TREND", "ETTR", "101/400", "2/s", "2 min", "n[1-2]", "1 run: 1 running"]
    assert all(word in first for word in (expected if words[0] == "status" else of_list))


def test_a_watch_ends_with_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its last state is printed, also in a pipe."""
    (run / "outcome.json").write_text('{"state": "completed", "step": 400, "reason": "done", "attempts": 1}')
    assert command(["status", "--watch", "runs/net-0"]) == 0
    assert capsys.readouterr().out.endswith("the run is over\n")
    with pytest.raises(UsageError, match="--show requires --watch"):
        command(["status", "--show", "loss", "runs/net-0"])


def test_watching_on_a_terminal_redraws_in_place_and_changes_nothing(run: Path) -> None:
    """A new size redraws at once. When the run is over, the command ends and its last state stays on the terminal."""
    terminal, side = pty.openpty()
    _resize(terminal, 100, 30)
    words = [sys.executable, "-m", "clusterddp", "status", "--watch", "runs/net-0"]
    environment = {**os.environ, "TERM": "xterm", "PATH": "", "PYTHONUTF8": "1"}
    process = subprocess.Popen(
        words, stdin=side, stdout=side, start_new_session=True, env=environment, preexec_fn=_own_terminal
    )
    os.close(side)
    try:
        shown = _until(terminal, "Ctrl-C")
        assert "\x1b[?1049h" in shown and "loss      2 █" in shown and "attempt 0: started" in shown
        before = _modified(run)
        _resize(terminal, 40, 12)
        assert "loss      2 █" in _until(terminal, "Ctrl-C")
        assert _modified(run) == before
        (run / "outcome.json").write_text('{"state": "completed", "step": 400, "reason": "done", "attempts": 1}')
        _resize(terminal, 60, 20)
        assert "\x1b[?1049l" in _until(terminal, "the run is over"), "the terminal's first screen is back"
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def _own_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _resize(terminal: int, columns: int, lines: int) -> None:
    """As a window does; the processes in the terminal get SIGWINCH."""
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


def _until(terminal: int, words: str) -> str:
    """What appears on the terminal up to these words."""
    shown = ""
    while words not in shown:
        shown += os.read(terminal, 65536).decode(errors="replace")
    return shown


def _modified(run: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in run.rglob("*")}


def test_a_moment_of_another_year_has_the_year() -> None:
    """Also with a time zone, in which 1970 may not have begun."""
    assert re.fullmatch(r"(1969|1970)-\d\d-\d\d \d\d:\d\d:\d\d", moment(0.0))
    assert re.fullmatch(r"\d\d-\d\d \d\d:\d\d:\d\d", moment(time.time()))
