"""Scripts that do not use clusterddp: the signal that they expect, when they are done, and preemptions at a line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from clusterddp.errors import UNCONFIRMED
from clusterddp.rundir.run_directory import RunDirectory
from tests import cli
from tests.preempting import preempting
from tests.runs_on_disk import outcome_of
from tests.waiting import story, wait_until

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
SAVES, FINDS, TIDIES = (
    str(SCRIPTS / f"{name}.py") for name in ("saves_on_a_signal", "finds_its_folder", "finishes_and_tidies")
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which the scripts write to."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


clusterddp = partial(cli.clusterddp, code=None, cwd=Path())


def local(script: str, *options: str, ranks: int = 1) -> list[str]:
    shape = ["--device", "cpu", "--gpus", str(ranks), "--local", "--run-dir", "run"]
    return ["submit", script, *shape, *options]


def submit(script: str, *options: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    return clusterddp(*local(script, *options, ranks=ranks))


def output(attempt: int, rank: int = 0) -> str:
    log = RunDirectory("run").attempt_logs(attempt) / f"rank-{rank}.out"
    return log.read_text() if log.exists() else ""


def outcome() -> dict[str, object]:
    return dict(outcome_of(RunDirectory("run")) or {})


@pytest.mark.parametrize("name", ["USR1", pytest.param("USR2", marks=pytest.mark.product)])
def test_every_rank_gets_the_signal_that_its_script_expects_and_may_save(folder: Path, name: str) -> None:
    """As fairseq2 and lingua: instead of TERM, once; exit code 0 then is a stop; rank 1 takes longer than rank 0."""
    with preempting("^step 3$"):
        done = submit(SAVES, "--set", f"stop.signal={name}", "--", f"SIG{name}", "saves", "30", ranks=2)
    assert done.returncode == 0, done.stderr
    assert outcome()["attempts"] == 2
    for rank in (0, 1):
        saved = output(0, rank).splitlines()[-1]
        assert saved.endswith(f"on ['SIG{name}']") and "TERM came" not in output(0, rank), output(0, rank)
        assert output(1, rank).startswith(f"starts at step {saved.split()[2]}\n")


def test_stop_and_requeue_reach_a_script_that_expects_a_signal(folder: Path) -> None:
    """Both are told over the connection: nothing else signals the ranks."""
    run = RunDirectory("run")
    options = ["--set", "stop.signal=INT", "--", "SIGINT", "saves", "5000"]
    loop = subprocess.Popen([sys.executable, "-m", "clusterddp", *local(SAVES, *options, ranks=2)])
    try:
        wait_until(lambda: 0 in run.attempts() and "step 0" in output(0, 1), "the first step")
        asked = clusterddp("requeue", "run")
        assert asked.returncode == 0, asked.stderr
        wait_until(lambda: 1 in run.attempts() and "starts" in output(1, 1), "the second attempt")
        asked = clusterddp("stop", "run")
        assert loop.wait(timeout=60) == 130, story(run)
    finally:
        loop.kill()
    assert asked.returncode == 0, asked.stderr
    assert "saved step" in output(0, 0) and "saved step" in output(0, 1) and "saved step" in output(1, 1)
    assert [event["cause"] for event in run.events() if event["event"] in ("requeued", "stopped")] == [
        "stopped by `clusterddp requeue`",
        "stopped by `clusterddp stop`",
    ]
    assert run.outcome() is None


def test_exit_0_at_once_in_a_later_attempt_is_not_confirmed(folder: Path) -> None:
    """As open_clip, which finds its own folder; said wherever the run's end is."""
    with preempting("step 30"):
        done = submit(FINDS, "--", "exp", "2000")
    assert done.returncode == UNCONFIRMED, done.stderr
    assert (outcome()["state"], outcome()["confirmed"]) == ("completed", False)
    said = "unconfirmed: the script exited with code 0 after 0 s, less than a tenth of the"
    assert f"attempt 1: completed after 2 attempts, {said}" in done.stderr
    assert "name the file that marks it: `clusterddp submit [--local] --run-dir RUN --change" in done.stderr
    assert said in clusterddp("status", "run").stdout
    assert said in clusterddp("list", "run").stdout
    (listed,) = json.loads(clusterddp("list", "run", "--json").stdout)
    assert (listed["state"], listed["confirmed"]) == ("completed", False)
    assert clusterddp("report", "run").returncode == 0
    assert "Unconfirmed: the script exited with code 0" in Path("run-report.html").read_text()
    waited = clusterddp("wait", "run")
    assert (waited.returncode, said in waited.stderr) == (UNCONFIRMED, True)
    again = submit(FINDS, "--", "exp", "2000")  # nothing has changed, so nothing is confirmed
    assert again.returncode == UNCONFIRMED, again.stderr


def test_exit_0_without_the_mark_of_its_end_restarts_once_and_then_ends_the_run(folder: Path) -> None:
    """With `done`, exit code 0 alone is no confirmed completion, in any attempt."""
    with preempting("step 3"):
        done = submit(FINDS, "--set", "done=exp/finished", "--", "exp", "500")
    assert done.returncode == UNCONFIRMED
    lacks = (
        "all ranks exited with code 0, but the completion marker (`done`) is missing: "
        f"there is no file {folder}/exp/finished. "
        "If the training is complete, correct `done`"
    )
    assert f"attempt 1: {lacks}. No step was recorded. Restarting all ranks in place" in done.stderr
    assert (outcome()["state"], outcome()["attempts"], outcome()["confirmed"]) == ("completed", 3, False)


def test_a_run_that_is_preempted_or_fails_after_its_mark_has_completed(folder: Path) -> None:
    """As yolov5, whose next start would fail: training is finished, nothing to resume."""
    with preempting("3 epochs completed"):
        done = submit(TIDIES, "--set", "done=exp/best.txt", "--", "exp", "3")
    assert done.returncode == 0, done.stderr
    expected = {"state": "completed", "step": None, "attempts": 1}
    assert outcome() == {**expected, "reason": f"done: {folder}/exp/best.txt exists. The last attempt: preempted"}
    Path("run").rename("first")
    Path("exp").rename("old")
    done = submit(
        TIDIES, "--set", "done={log: '^\\d+ epochs completed'}", "--set", "steps=off", "--", "exp", "3", "--fails"
    )
    assert done.returncode == 0, done.stderr
    assert "RuntimeError: plots need a display" in done.stderr
    assert outcome()["state"] == "completed"
    assert str(outcome()["reason"]).startswith("done: rank 0 printed '3 epochs completed'. The last attempt: ")


def test_no_attempt_is_started_once_the_mark_is_there(folder: Path) -> None:
    """Its supervisor was ended before it could look."""
    run = RunDirectory("run")
    options = ["--set", "done={run_dir}/exp/best.txt", "--", "run/exp", "5000"]
    loop = subprocess.Popen([sys.executable, "-m", "clusterddp", *local(TIDIES, *options)])
    wait_until(lambda: loop.poll() is not None or (0 in run.attempts() and "epoch 0" in output(0)), "the first epoch")
    loop.send_signal(signal.SIGINT)
    assert loop.wait(timeout=60) == 130
    Path("run/exp/best.txt").touch()
    done = clusterddp("submit", "--local", "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    assert outcome()["attempts"] == 1 and str(outcome()["reason"]).endswith("done: exp/best.txt exists")


def test_preemptions_at_lines_and_seconds_come_in_their_order(folder: Path) -> None:
    """One per attempt; one whose line never comes is named, and the command fails."""
    with preempting("starts at", 0.0, "no such line"):
        done = submit(SAVES, "--", "SIGUSR1", "saves", "10")
    assert done.returncode == 1, done.stderr
    assert (outcome()["state"], outcome()["attempts"]) == ("completed", 3)
    assert "without the preemption at a line that matches 'no such line'" in done.stderr
