"""A run that hangs is noticed, explained and started anew; one that only takes its time is left alone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clusterddp.rundir import RunDirectory
from tests.test_local import ranks_of, variable
from tests.trainings import events_of
from tests.waiting import differing, final_state, story, wait_for_step

REPOSITORY = Path(__file__).resolve().parents[1]


def start(run: RunDirectory, how: str, *options: str) -> subprocess.Popen[str]:
    """Two ranks of tests/scripts/hanging.py."""
    command = [sys.executable, "-m", "clusterddp.submit", "tests/scripts/hanging.py", "--local", "--run-dir", str(run)]
    shape = ["--device", "cpu", "--gpus", "2", "--set", "watchdog.step_s=4", "--set", "checkpoint.every=10 steps"]
    return subprocess.Popen([*command, *shape, *options, "--", how], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen[str], run: RunDirectory, code: int = 0) -> str:
    _, said = process.communicate(timeout=120)
    assert process.returncode == code, said + story(run)
    return said


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDirectory, str]:
    """A run with a slow rank, that once takes longer than the watchdog allows, and what was said of it."""
    run = RunDirectory(tmp_path_factory.mktemp("slow") / "run")
    return run, finished(start(run, "slow"), run)


def test_a_pause_that_was_announced_is_no_hang(slow: tuple[RunDirectory, str]) -> None:
    """The other rank waits for it in a collective, for longer than the watchdog allows."""
    run, _ = slow
    assert run.attempts() == [0], story(run)


@pytest.mark.parametrize("how", ["lock", "extension", "stopped"])
def test_a_rank_that_hangs_is_named_with_its_stack_and_all_start_anew_in_place(
    run: RunDirectory, slow: tuple[RunDirectory, str], how: str
) -> None:
    """Python code that waits for ever; C code that does, and holds Python's lock; a process that is stopped."""
    process = start(run, how)
    if how == "stopped":
        wait_for_step(run, 40)
        (victim,) = [pid for pid in ranks_of(run) if variable(pid, "RANK") == "1"]
        os.kill(victim, signal.SIGSTOP)
    said = finished(process, run)
    (hung,) = events_of(run, "hung")
    assert hung["ranks"] == [1]
    silent = r", and not heard of since \(stopped, or holding Python's lock\)"
    where = r", in hanging.py:\d+ \(misbehave\)" if how == "lock" else silent
    sentence = rf"rank 1 \(\S+\) last at step \d+, \d+ s ago{where}; the others wait in the all_reduce of backward"
    assert re.search(f"attempt 0: {sentence}; ending all ranks", said), said
    logs = run.attempt_logs(0)
    assert "_engine_run_backward" in (logs / "rank-0.err").read_text()
    assert ("in misbehave" in (logs / "rank-1.err").read_text()) == (how != "stopped")
    assert '"gloo:all' in (logs / "rank-0.collectives.json").read_text()
    assert [event["event"] for event in run.events() if event["event"] in ("restarted", "rank_failed")] == ["restarted"]
    assert [line["loss"] for line in run.metrics()] == [line["loss"] for line in slow[0].metrics()]
    assert differing(final_state(run), final_state(slow[0])) == []
