"""How a rank ends: exit code 0 is not "completed" while steps are left, and its process exits in bounded time."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from clusterddp.codec import read
from clusterddp.messages.reports import Left
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm.run_states import Cause
from clusterddp.supervisor.verdict import Action, RankEnd, judge
from tests.ranks.test_child_processes import TRAINING
from tests.ranks.test_local import submit
from tests.runs_on_disk import outcome_of
from tests.waiting import story

EARLY = f"""
import os, sys
{TRAINING}
def one_step(batch):
    train(batch)
    if run.step == 3 and sys.argv[1] == "sys.exit":
        sys.exit(0)
    if run.step == 3 and sys.argv[1] == "os._exit":
        os._exit(0)

def main():
    for batch in run.steps(6):
        one_step(batch)
        if run.step == 3 and sys.argv[1] == "break":
            break

main()
sys.exit(0) if sys.argv[1] != "os._exit at the end" else os._exit(0)
"""


@pytest.mark.parametrize(
    ("how", "state", "reason"),
    [
        ("sys.exit", "failed", "exited with code 0 inside its training loop, after step 4 of 6"),
        ("os._exit", "failed", "called os._exit(0) inside its training loop"),
        pytest.param(  # test_early_end.py has loops that are left by break
            "break", "completed", "all ranks finished", marks=pytest.mark.product
        ),
        pytest.param("os._exit at the end", "completed", "all ranks finished", marks=pytest.mark.product),
    ],
)
def test_exit_code_0_with_steps_left_is_not_completed(tmp_path: Path, how: str, state: str, reason: str) -> None:
    """``break`` is the script's decision, and reported as unsaved; an exit in the loop is a failure."""
    script, run = tmp_path / "early.py", RunDirectory(tmp_path / "run")
    script.write_text(EARLY)
    done = submit(run, str(script), "--device", "cpu", "--gpus", "1", "--", how)
    outcome = outcome_of(run) or {}
    assert outcome["state"] == state, story(run)
    assert reason in outcome["reason"]
    assert done.returncode == (0 if state == "completed" else 1)
    assert run.attempts() == [0]


@pytest.mark.parametrize(
    ("code", "shown"),
    [*(pytest.param(code, 1, marks=pytest.mark.product) for code in ("True", "256")), ("2**70 - 1", 255)],
)
def test_a_script_that_exits_with_any_other_code_has_failed(tmp_path: Path, code: str, shown: int) -> None:
    """Also where none of the 8 bits that the system takes of a number is set: a shell would see 0."""
    script, run = tmp_path / "exits.py", RunDirectory(tmp_path / "run")
    script.write_text(f"import sys\nsys.exit({code})\n")
    done = submit(run, str(script), "--device", "cpu", "--gpus", "1")
    outcome = outcome_of(run) or {}
    assert (outcome["state"], done.returncode, run.attempts()) == ("failed", shown, [0]), story(run)
    assert outcome["reason"].endswith(f"exited with code {shown}")


LINGERING = f"""
import atexit, multiprocessing, os, signal, subprocess, sys, threading
from tests.stops import request_stop
from clusterddp.worker import rank_exit
rank_exit.EXIT_GRACE_S = rank_exit.STOP_GRACE_S = 0.5

def forever(*_):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR2])
    threading.Event().wait()

def start(daemon):
    process = multiprocessing.get_context("fork").Process(target=forever, daemon=daemon, name=f"helper-{{daemon}}")
    process.start()
    print("pid", process.pid, flush=True)

{TRAINING}
try:
    for batch in run.steps(4 if ctx.attempt else 1_000_000):  # the stop takes some steps
        train(batch)
        if run.step == 1 and ctx.attempt == 0:
            request_stop(ctx)
            start(True)
            start(False)
finally:
    if ctx.attempt == 0:
        threading.Event().wait()
start(True)
start(False)
threading.Thread(target=forever, name="uploader").start()
atexit.register(forever)
"""


def test_nothing_in_the_script_delays_a_ranks_exit_beyond_its_grace_period(tmp_path: Path) -> None:
    """Children that block TERM, threads, an exit handler, a ``finally`` that never ends: ended, killed, and named."""
    script, run = tmp_path / "lingering.py", RunDirectory(tmp_path / "run")
    script.write_text(LINGERING)
    stopped = submit(run, str(script), "--device", "cpu", "--gpus", "1")
    assert stopped.returncode == 130 and run.outcome() is None, stopped.stderr + story(run)
    assert submit(run).returncode == 0
    step = max(4, *(event["step"] for event in run.events() if event["event"] == "stopped"))
    assert outcome_of(run) == {"state": "completed", "step": step, "attempts": 2, "reason": "all ranks finished"}
    first, second = ((run.attempt_logs(attempt) / "rank-0.err").read_text() for attempt in (0, 1))
    assert re.search(
        r"exiting 0.5 s after the stop, although this is still running: main thread in lingering.py:\d+ \(<module>\), "
        r"process \d+ \(helper-True\), process \d+ \(helper-False\)\n", first,
    ), first  # fmt: skip
    assert re.search(
        r"exiting 0.5 s after the end of the script, although this is still running: thread 'uploader' in "
        r"lingering.py:\d+ \(forever\), process \d+ \(helper-True\), process \d+ \(helper-False\)\n", second,
    ), second  # fmt: skip
    logs = [(run.attempt_logs(attempt) / "rank-0.out").read_text() for attempt in (0, 1)]
    pids = re.findall(r"pid (\d+)", "".join(logs))
    assert len(pids) == 4
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists() and b"lingering" in _command(pid)]


EXIT_HANDLERS = """
import atexit, logging.handlers, multiprocessing, os, sys, tempfile, threading
how, out, rank = sys.argv[1], sys.argv[2], os.environ["RANK"]
buffered = logging.handlers.MemoryHandler(1000, target=logging.FileHandler(f"{out}/log-{rank}"))
logging.getLogger().addHandler(buffered)
logging.getLogger().warning("a line in a buffered log")
folder = tempfile.TemporaryDirectory(dir=out)
atexit.register(lambda: open(f"{out}/exit-{rank}", "w").close())
if how == "peer":
    import clusterddp
    ctx = clusterddp.init()
    if rank == "0":
        threading.Event().wait()
if how == "worker":
    multiprocessing.get_context("fork").Process(target=threading.Event().wait, daemon=False).start()
if how == "exit":
    sys.exit(3)
if how == "text":
    sys.exit("bad option")
if how == "interrupt":
    raise KeyboardInterrupt
raise ValueError("bad label")
"""


@pytest.mark.parametrize(
    "how",
    [
        *(pytest.param(how, marks=pytest.mark.product) for how in ("raise", "exit", "text", "interrupt")),
        "worker",
        "peer",
    ],
)
def test_exit_handlers_run_after_a_failure_also_on_ranks_that_wait_for_the_failed_one(tmp_path: Path, how: str) -> None:
    """Loggers and trackers write their last lines there. ``peer``: rank 0 never returns to its script."""
    script, run, ranks = tmp_path / "fails.py", RunDirectory(tmp_path / "run"), 2 if how == "peer" else 1
    script.write_text(EXIT_HANDLERS)
    (out := tmp_path / "out").mkdir()
    done = submit(run, str(script), "--device", "cpu", "--gpus", str(ranks), "--", how, str(out))
    assert done.returncode != 0 and run.attempts() == [0], story(run)
    assert sorted(file.name for file in out.iterdir()) == [
        f"{kind}-{rank}" for kind in ("exit", "log") for rank in range(ranks)
    ]
    assert all((out / f"log-{rank}").read_text() == "a line in a buffered log\n" for rank in range(ranks))


def _command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _judged(cause: Cause, stop_sent: bool = False, **end: Any) -> Action:
    record = read(Left, {"host": "n1", "used_clusterddp": True, **end})
    return judge([RankEnd.of(0, "n1", 1.0, record)], 0, stop_sent, lambda: cause).action


@pytest.mark.parametrize(
    ("cause", "left_by_break", "exited"),
    [
        (Cause.NONE, Action.COMPLETE, Action.FAIL),
        (Cause.PREEMPTED, Action.AGAIN, Action.AGAIN),
        (Cause.PREEMPTED_WITHOUT_GRACE, Action.LEAVE_TO_SLURM, Action.LEAVE_TO_SLURM),
        (Cause.CANCELLED, Action.CANCEL, Action.CANCEL),
        (Cause.INTERRUPTED, Action.LEAVE, Action.LEAVE),
        (Cause.UNKNOWN, Action.COMPLETE, Action.LEAVE),
    ],
)
def test_an_exit_with_steps_left_is_a_stop_when_there_is_a_reason_to_stop(
    cause: Cause, left_by_break: Action, exited: Action
) -> None:
    """The script may have left its loop because its own handler got the notice. A complete loop is completed."""
    assert _judged(cause, end="done", left_loop=True) is left_by_break
    assert _judged(cause, end="unfinished", error="exited with code 0") is exited
    assert _judged(cause, end="done") is Action.COMPLETE


def test_a_break_after_a_notice_is_no_completion_while_the_controller_is_unreachable() -> None:
    """Its cause remains unknown."""
    assert _judged(Cause.UNKNOWN, stop_sent=True, end="done", left_loop=True) is Action.LEAVE
