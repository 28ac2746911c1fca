"""A local run whose terminal is closed, or whose output cannot be written."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from clusterddp.errors import BROKEN_PIPE, WAITED
from clusterddp.jobdef.job import Job
from clusterddp.process import module_command
from clusterddp.rundir.files import write_json
from clusterddp.rundir.json_lines import read_lines
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.runs.local import interrupts_counted
from tests.histories import happened
from tests.runs_on_disk import outcome_of
from tests.waiting import story, wait_until

TRAIN = """
import sys, time
from pathlib import Path
import torch
import clusterddp
from tests.descent import Descent

ctx = clusterddp.init()
model = torch.nn.Linear(2, 1)
run = ctx.run(model=model, optimizer=Descent(model))
for _ in run.steps(int(sys.argv[1])):
    model(torch.ones(2)).sum().backward()
    run.log(loss=1.0)
    time.sleep(0.05)
    if run.step == 20:
        Path(sys.argv[2]).touch()
"""


def in_terminal(command: Sequence[str], ignored: Sequence[signal.Signals] = ()) -> tuple[int, int]:
    """Starts a command as the leader of a new terminal's session. Returns its pid and the terminal's other end."""
    pid, terminal = pty.fork()
    if pid == 0:
        for signum in ignored:
            signal.signal(signum, signal.SIG_IGN)
        os.execvp(command[0], list(command))
    return pid, terminal


def exit_code(pid: int) -> int:
    status = wait_until(
        lambda: [found[1]] if (found := os.waitpid(pid, os.WNOHANG))[0] else [], f"the end of {pid}", 60
    )
    return os.waitstatus_to_exitcode(status[0])


@pytest.mark.parametrize("nohup", [False, pytest.param(True, marks=pytest.mark.product)])
def test_a_local_run_whose_terminal_is_closed_saves_and_stops_or_continues_under_nohup(
    tmp_path: Path, nohup: bool
) -> None:
    """The shell and the kernel both send HUP, and all that the command prints from then on fails."""
    run, script, mark = RunDirectory(tmp_path / "run"), tmp_path / "train.py", tmp_path / "mark"
    script.write_text(TRAIN)
    words = ["submit", str(script), "--local", "--device", "cpu", "--run-dir", str(run)]
    steps = "60" if nohup else "100000"
    command = [*module_command("clusterddp"), *words, "--", steps, str(mark)]
    pid, terminal = in_terminal(command, [signal.SIGHUP] if nohup else [])
    wait_until(mark.exists, "step 20", 60)
    os.close(terminal)
    if not nohup:
        os.kill(pid, signal.SIGHUP)
    code = exit_code(pid)
    names = [event["event"] for event in run.events()]
    last = max(line["step"] for line in read_lines(run.metrics_file))
    saved = max(int(path.name.split(".")[0].removeprefix("step-")) for path in run.checkpoints.iterdir())
    assert (saved, run.outcome() is not None) == (last + 1, nohup), story(run)
    assert (code, names[-1]) == ((0, "completed") if nohup else (130, "stopped")), story(run)


def test_a_watching_command_whose_terminal_is_closed_under_nohup_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets no signal, and looks at the run's files no more."""
    monkeypatch.setenv("TERM", "xterm")
    run = RunDirectory(tmp_path / "run")
    run.create()
    run.job_file.write_text(Job(name="x", module="x", steps=10).to_yaml())
    happened(run, {"time": 1.0, "attempt": 0, "event": "started"})
    pid, terminal = in_terminal([*module_command("clusterddp"), "status", "--watch", str(run)], [signal.SIGHUP])
    shown = b""
    while b"steps" not in shown:
        shown += os.read(terminal, 4096)
    os.close(terminal)
    try:
        assert exit_code(pid) == 130
    except AssertionError:
        os.kill(pid, signal.SIGKILL)
        raise


@pytest.mark.parametrize("ignored", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_is_ignored_from_the_start_stays_so(ignored: signal.Signals) -> None:
    """As of nohup, and of a shell's background job. And a hang-up is no second interrupt."""
    counted: list[int] = []
    other = signal.SIGINT if ignored is signal.SIGHUP else signal.SIGTERM
    before = signal.signal(ignored, signal.SIG_IGN)
    try:
        with interrupts_counted(lambda: counted.append(1)):
            signal.raise_signal(ignored)
            assert not counted
            signal.raise_signal(other)
            signal.raise_signal(signal.SIGHUP)
            assert len(counted) == 1
            signal.raise_signal(other)
            assert len(counted) == 2
    finally:
        signal.signal(ignored, before)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_local_run_whose_output_goes_to_a_full_disk_completes(tmp_path: Path) -> None:
    run, script = RunDirectory(tmp_path / "run"), tmp_path / "train.py"
    script.write_text("print('trained')\n")
    words = ["submit", str(script), "--local", "--device", "cpu", "--run-dir", str(run)]
    with open("/dev/full", "w") as full:
        subprocess.run([*module_command("clusterddp"), *words], stdout=full, stderr=full, timeout=60, check=False)
    assert (outcome_of(run) or {}).get("state") == "completed"


def unfinished_run(tmp_path: Path) -> tuple[RunDirectory, Path]:
    """A run whose rank 0 has printed a line, and that rank's output."""
    run = RunDirectory(tmp_path / "run")
    run.create()
    run.job_file.write_text(Job(name="x", module="x", steps=10).to_yaml())
    output = run.attempt_logs(run.create_attempt()) / "rank-0.out"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("first\n")
    happened(run, {"time": 1.0, "attempt": 0, "event": "started"})
    return run, output


@pytest.mark.parametrize("prints", [False, True])
@pytest.mark.parametrize("reader", ["terminal", "pipe"])
def test_logs_that_are_followed_end_with_whoever_reads_them(tmp_path: Path, reader: str, prints: bool) -> None:
    """A terminal that is closed under nohup, or `| head`: at once, whether the rank prints more or not."""
    run, output = unfinished_run(tmp_path)
    command = [*module_command("clusterddp"), "logs", "-f", str(run)]
    errors = tmp_path / "errors"
    if reader == "terminal":
        command = ["sh", "-c", 'exec "$@" 2>"$0"', str(errors), *command]
        pid, end = in_terminal(command, [signal.SIGHUP])
    else:
        end, write = os.pipe()
        with errors.open("w") as file:
            pid = subprocess.Popen(command, stdout=write, stderr=file).pid
        os.close(write)
    shown = b""
    while b"first" not in shown:
        shown += os.read(end, 4096)
    os.close(end)
    if prints:
        with output.open("a") as file:
            file.write("second\n")
    try:
        assert (exit_code(pid), errors.read_text()) == (BROKEN_PIPE, "")
    except AssertionError:
        os.kill(pid, signal.SIGKILL)
        raise
    assert not list(tmp_path.rglob("*.traceback"))


def test_a_wait_whose_terminal_is_closed_under_nohup_ends_with_the_runs_code(tmp_path: Path) -> None:
    run, _ = unfinished_run(tmp_path)
    command = ["sh", "-c", 'echo started; exec "$@"', "sh", *module_command("clusterddp"), "wait", str(run)]
    pid, terminal = in_terminal(command, [signal.SIGHUP])
    os.read(terminal, 4096)
    os.close(terminal)
    write_json(run.outcome_file, {"state": "failed", "step": 1, "attempts": 1, "reason": "x"})
    assert exit_code(pid) == WAITED["failed"]
