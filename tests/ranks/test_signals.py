"""What a script does to the signals of its process: the notice arrives, or the history says that it cannot."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm.run_states import Cause
from clusterddp.supervisor.controller import give_notice
from clusterddp.worker.signals import SignalPipe, described
from tests.ranks.test_child_processes import TRAINING
from tests.ranks.test_local import ranks_of, start
from tests.runs_on_disk import outcome_of
from tests.waiting import story, wait_for_step, wait_until

OWN_HANDLER = f"""
import os, signal, sys, time
{TRAINING}
def mine(number, frame):
    sys.exit(0)

for batch in run.steps(6):
    train(batch)
    if ctx.attempt == 0:
        if run.step == 2:
            {{}}
        while run.step == 4 and not ctx._agreement.reason:  # no public name: ranks have not agreed yet
            time.sleep(0.01)
"""


def attempt_under(tmp_path: Path, act: str, *signals: signal.Signals) -> RunDirectory:
    """A run whose first attempt does ``act`` to its signals; preempted, with ``signals`` sent to its rank."""
    script, run = tmp_path / "signals.py", RunDirectory(tmp_path / "run")
    script.write_text(OWN_HANDLER.format(act))
    process = start(run, str(script), "--device", "cpu", "--gpus", "1")
    try:
        wait_until(lambda: any('"step": 3' in line for line in _lines(run)), "step 3", timeout=60)
        give_notice(run, Cause.PREEMPTED)
        for pid in ranks_of(run):
            for number in signals:
                os.kill(pid, number)
        _, err = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == 0, err + story(run)
    assert (outcome_of(run) or {})["attempts"] == 2, story(run)
    return run


def _lines(run: RunDirectory) -> list[str]:
    return run.metrics_file.read_text().splitlines() if run.metrics_file.exists() else []


def test_a_handler_of_the_script_is_reported_and_its_exit_0_is_a_preemption_not_completion(tmp_path: Path) -> None:
    """The steps since the last checkpoint are repeated."""
    run = attempt_under(tmp_path, "signal.signal(signal.SIGTERM, mine)", signal.SIGTERM)
    events = {event["event"]: event for event in run.events() if event["attempt"] == 0}
    assert events["handler_replaced"]["handler"] == f"mine (signals.py:{_line_of('def mine')})"
    assert events["requeued"]["cause"] == "preempted"
    said = (run.attempt_logs(0) / "rank-0.err").read_text()
    assert (
        "clusterddp: the script replaced the TERM handler of clusterddp.init() with mine (signals.py:"
        f"{_line_of('def mine')}). If that handler exits or raises, the steps since the last checkpoint are "
        "repeated. Remove it, because clusterddp saves and stops the run\n"
    ) in said
    assert "exited with code 0 inside its training loop, after step 5 of 6" in said


ONE_EXITS = f"""
import os, signal, sys, time
{TRAINING}
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
for batch in run.steps(6):
    train(batch)
    if run.step == 4 and ctx.attempt == 0:
        while ctx.is_main and not os.path.exists(f"{{ctx.run_dir}}/private/notice.json"):
            time.sleep(0.01)
        if ctx.is_main:
            os.kill(os.getpid(), signal.SIGTERM)
        while not ctx._agreement.reason:  # the other rank then waits for this one in the next step's all_reduce
            time.sleep(0.01)
"""


@pytest.mark.product  # the test above has a handler that exits
def test_a_handler_that_exits_before_the_other_rank_has_the_signal_delays_no_preemption(tmp_path: Path) -> None:
    """If rank 0 waited for it, and it for rank 0, Slurm would kill both before the job is requeued."""
    script, run = tmp_path / "signals.py", RunDirectory(tmp_path / "run")
    script.write_text(ONE_EXITS)
    process = start(run, str(script), "--device", "cpu", "--gpus", "2")
    wait_for_step(run, 3)
    give_notice(run, Cause.PREEMPTED)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 0 and run.attempts() == [0, 1], err + story(run)
    assert (
        "exited with code 0 inside its training loop, after step 5 of 6"
        in (run.attempt_logs(0) / "rank-0.err").read_text()
    )
    assert "after the end of the script; still running" not in story(run)


def _line_of(text: str) -> int:
    return next(number for number, line in enumerate(OWN_HANDLER.splitlines(), 1) if line.startswith(text))


@pytest.mark.product  # slurm/test_preemption.py has a supervisor's notice
def test_a_notice_without_a_signal_comes_from_the_supervisor(tmp_path: Path) -> None:
    """The script's handler does nothing, and the wakeup descriptor is removed; all ranks save and stop."""
    act = "signal.signal(signal.SIGTERM, lambda *_: None); signal.set_wakeup_fd(-1)"
    run = attempt_under(tmp_path, act, signal.SIGTERM)
    events = {event["event"]: event for event in run.events() if event["attempt"] == 0}
    assert events["notified"]["reason"] == "preemption"
    assert events["stopping"]["reason"] == "preemption"
    assert events["requeued"]["checkpoint"] == events["requeued"]["step"] == 5


@pytest.fixture
def pipe() -> Any:
    pipe = SignalPipe()
    yield pipe
    pipe.close(restore_handlers=True)


@pytest.mark.parametrize("action", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_default_or_ignored_term_is_handled_again_after_the_next_step(
    pipe: SignalPipe, action: signal.Handlers
) -> None:
    """asyncio leaves the default action; the wakeup descriptor may be removed, too."""
    heard: list[signal.Signals] = []
    pipe.listen(heard.append)
    signal.signal(signal.SIGTERM, action)
    signal.set_wakeup_fd(-1)
    pipe.check()
    os.kill(os.getpid(), signal.SIGTERM)
    wait_until(lambda: heard == [signal.SIGTERM], "the signal", timeout=10)


def test_another_wakeup_descriptor_gets_its_bytes_and_the_notice_still_arrives(pipe: SignalPipe) -> None:
    """As under asyncio or trio at work."""
    heard: list[signal.Signals] = []
    pipe.listen(heard.append)
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    os.kill(os.getpid(), signal.SIGTERM)
    wait_until(lambda: heard == [signal.SIGTERM], "the signal", timeout=10)
    assert os.read(read, 1) == bytes([signal.SIGTERM])
    assert signal.set_wakeup_fd(-1) == write
    os.close(read)
    os.close(write)


def test_a_replaced_handler_is_reported_once_and_stays(pipe: SignalPipe) -> None:
    """It is the script's code."""
    replaced: list[str] = []
    pipe.listen(lambda _: None, lambda number, handler: replaced.append(f"{number.name} {described(handler)}"))

    def own(*_: object) -> None: ...

    ours = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, own)
    pipe.check()
    pipe.check()
    line = own.__code__.co_firstlineno
    assert replaced == [f"SIGTERM {own.__qualname__} (test_signals.py:{line})"]
    assert signal.getsignal(signal.SIGTERM) is own
    signal.signal(signal.SIGTERM, ours)
