"""``--watch`` in a pipe and on a real terminal, and what a column of a terminal holds."""

from __future__ import annotations

import fcntl
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

from clusterddp.cli.command_line import command
from clusterddp.errors import INTERRUPTED
from clusterddp.reporter import clipped
from clusterddp.runs.run_report import moment
from tests.fake_slurm import FakeSlurm
from tests.runs_on_disk import BEGAN, event, of_job, recorded_run, started, steps


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
def run(tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A running run, with squeue's answer about its job."""
    history = [started(), event("progress", step=0, steps=400, rank=0), event("training", step=0)]
    history.append(event("slow", rank=1, host="n2", own_s=0.4, ratio=2.0))
    losses = [line | {"loss": 2.0 - line["step"] / 100, "acc": 0.25} for line in steps(range(101))]
    recorded_run(tmp_path / "runs/net-0", history, holder=of_job(), metrics=losses)
    fake_slurm["squeue"] = "41|RUNNING|n[1-2]|2026-11-22T08:00:00|1:00:00|gpu|None\n"
    monkeypatch.setattr(time, "time", lambda: BEGAN + 60)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLUSTERDDP_RUNS", "runs")
    return tmp_path / "runs/net-0"


@pytest.mark.parametrize("words", [["status", "--watch", "runs/net-0"], ["list", "--watch", "--show", "acc"]])
def test_watching_in_a_pipe_prints_a_block_at_each_look(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """Until Ctrl-C, and without control characters."""
    looks: list[int] = []

    def sleep(_: float) -> None:
        looks.append(1)
        if len(looks) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    assert command(words) == INTERRUPTED
    before, first, second = capsys.readouterr().out.split(", every 5 s until Ctrl-C\n")
    assert before.count(":") == 2 and first.count("\n") == second.count("\n") and "\x1b" not in first
    expected = ["101 of 400", "loss 1, acc 0.25", "2/s, about 2 min left", "ETTR", "nodes     n[1-2]"]
    of_list = ["ACC", "101/400", "2/s", "2 min", "n[1-2]", "0.25"]
    assert all(word in first for word in (expected if words[0] == "status" else of_list))
    if words[0] == "status":
        assert first.index("rank 1 (n2) is slow") < first.index("attempt 0: started"), "the newest event first"


def test_a_watch_ends_with_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its last state is printed, also in a pipe."""
    (run / "outcome.json").write_text('{"state": "completed", "step": 400, "reason": "done", "attempts": 1}')
    assert command(["status", "--watch", "runs/net-0"]) == 0
    assert "state     completed" in capsys.readouterr().out


def test_watching_on_a_terminal_redraws_in_place_and_changes_nothing(run: Path) -> None:
    """A new size, too. When the run is over, the command ends and its last state stays on the terminal."""
    terminal, side = pty.openpty()
    _resize(terminal, 100, 30)
    words = [sys.executable, "-m", "clusterddp", "status", "--watch", "runs/net-0"]
    environment = {**os.environ, "TERM": "xterm", "PATH": "", "PYTHONUTF8": "1"}
    process = subprocess.Popen(
        words, stdin=side, stdout=side, start_new_session=True, env=environment, preexec_fn=_own_terminal
    )
    os.close(side)
    try:
        shown = _until(terminal, "attempt 0: started")
        assert "\x1b[?1049h" in shown and "101 of 400" in shown
        before = _modified(run)
        _resize(terminal, 40, 12)
        _until(terminal, f"Ctrl-C{' ' * 8}\r\n")  # padded to the new width
        assert _modified(run) == before
        _resize(terminal, 60, 20)
        (run / "outcome.json").write_text('{"state": "completed", "step": 400, "reason": "done", "attempts": 1}')
        assert "state     completed" in _until(terminal, "attempt 0: started").partition("\x1b[?1049l")[2]
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
