"""Several ranks fail, and the box names the one that failed first, how, where and when: real processes, local runs."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from clusterddp import protocol
from clusterddp.failures.stack_traces import users_line
from clusterddp.messages.orders import Leave
from clusterddp.messages.reports import End, Left
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm.run_states import Cause
from clusterddp.supervisor import decide
from clusterddp.supervisor.attempt import Attempt
from clusterddp.supervisor.verdict import FirstFailure, RankEnd, failure_text
from clusterddp.worker import rank
from clusterddp.worker.control_channel import ControlChannel
from clusterddp.worker.rank_process import RankProcess
from tests.fake_slurm import FakeController, FakeRanks
from tests.ranks.test_local import submit
from tests.runs_on_disk import outcome_of
from tests.unit.test_attempt import JOB
from tests.waiting import story

HEAD = r"\| rank {rank} \(\S+\) {words}(?:.|\n)*?\n\| attempt 0{step}, \d\d\d\d-\d\d-\d\d \d\d:\d\d:\d\d\n"


@pytest.mark.parametrize(
    ("how", "ranks", "gpus", "words", "body", "over"),
    [
        pytest.param(  # as the next one, and the memory of rank 0
            "raise", [0], 2, "raised ValueError: bad label on rank 0", "failing.py", False, marks=pytest.mark.product
        ),
        ("raise", [1, 2], 3, "raised ValueError: bad label on rank [12]", "failing.py", False),
        pytest.param(  # unit/test_verdict.py has these words, the test below a worker that is killed
            "worker", [1], 2,
            r"raised ValueError: Caught ValueError in DataLoader worker process 0. ... ValueError: bad",
            "in __getitem__", None, marks=pytest.mark.product,
        ),
        pytest.param(  # gpu/test_device_faults.py has that of a device
            "memory", [0], 2, "ran out of memory: RuntimeError: ", "failing.py", False, marks=pytest.mark.product
        ),
        ("segfault", [1], 2, r"was killed by signal 11 \(SIGSEGV\)", "Fatal Python error: Segmentation fault", False),
        pytest.param(  # as the one above, and the stack of an abort is in test_stack_traces.py
            "abort", [0], 2, r"was killed by signal 6 \(SIGABRT\)", "Fatal Python error: Aborted", False,
            marks=pytest.mark.product,
        ),
        pytest.param(  # test_early_end.py has a loop that is left, the case above the box
            "leave", [1], 2, "exited with code 0 inside its training loop, after step 5", "0 waited for this rank:",
            True, marks=pytest.mark.product,
        ),
        pytest.param(  # test_early_end.py has a loop that is left by break, the case above the box
            "break", [1], 2, "exited with code 0 while other ranks waited for it", "0 waited for this rank:",
            False, marks=pytest.mark.product,
        ),
        pytest.param(  # test_rank_exit.py has os._exit, the cases above the box
            "exit", [1], 2, "exited with code 3 and no traceback", "log: ", False, marks=pytest.mark.product
        ),
    ],
)  # fmt: skip
def test_the_box_names_the_true_first_failure(
    run: RunDirectory, how: str, ranks: list[int], gpus: int, words: str, body: str, over: bool | None
) -> None:
    """With host, step, time and stack; the other ranks are listed as consequences.

    The failures that would restart the ranks have one attempt here.
    ``over``: whether the failure ends the run; None: if it came before the first step.
    """
    numbers = [str(rank) for rank in ranks]
    done = submit(
        run, "tests/scripts/failing.py", "--device", "cpu", "--gpus", str(gpus), "--set", "checkpoint.every=2 steps",
        "--set", "limits.attempts=1", "--", how, *numbers,
    )  # fmt: skip
    assert (done.returncode, run.attempts()) == (1, [0]), story(run)
    if over is not None:
        assert ("limits.attempts" in (outcome_of(run) or {})["reason"]) == (not over)
    first = f"[{''.join(numbers)}]"
    # A worker reads ahead of the steps.
    step = r"( at step \d)?" if how == "worker" else " at step 5"
    head = re.search(HEAD.format(rank=first, words=words, step=step), done.stderr)
    assert head, done.stderr
    box = done.stderr[head.start() :].partition("\n+---")[0]
    above = ranks == [0] and how in ("raise", "memory")  # rank 0's output is on the same terminal
    assert body in (done.stderr[: head.start()] if above else box)
    if how in ("segfault", "abort"):  # the stack of what crashed, and nothing of ours
        assert re.search(r'most recent call first\):\n(\|.*\n)*?.*failing.py", line \d+ in fail\n', box), box
    assert "clusterddp/worker/rank.py" not in box and "runpy" not in box, box
    others = re.findall(r"\| (also failed|as a result): rank (\d)", box)
    assert sorted(number for _, number in others) == [str(r) for r in range(gpus) if f"| rank {r} " not in head[0]], box
    besides = [number for kind, number in others if kind == "also failed"]
    assert set(besides) <= set(numbers), box


PASSING = """
import multiprocessing, os, signal, torch, clusterddp
from tests.descent import Descent
class Samples(torch.utils.data.Dataset):
    def __len__(self): return 4000
    def __getitem__(self, index): return torch.ones(4)
ctx = clusterddp.init()
attempt = int(os.environ["CLUSTERDDP_ATTEMPT"])
if attempt == 1:
    raise OSError(116, "Stale file handle")
model = torch.nn.Linear(4, 1)
optimizer = Descent(model, 1e-6)
run = ctx.run(model=model, optimizer=optimizer, loader=ctx.loader(Samples(), 2, num_workers=1))
for batch in run.steps(40):
    if run.step == 7 and attempt == 0:
        for child in multiprocessing.active_children():
            os.kill(child.pid, signal.SIGKILL)
    if run.step == 33:
        raise ValueError("bad sample")
    model(batch).mean().backward(); optimizer.step()
"""


def test_an_exception_after_progress_restarts_all_ranks_and_the_same_one_twice_ends_the_run(run: RunDirectory) -> None:
    """A killed DataLoader worker, and a file system that fails before a restore, pass; a bad sample does not."""
    script = run.path.with_name("passing.py")
    script.write_text(PASSING)
    done = submit(run, str(script), "--device", "cpu", "--gpus", "1", "--set", "checkpoint.every=5 steps")
    assert (done.returncode, run.attempts()) == (1, [0, 1, 2, 3]), story(run)
    raised = [event["raised"] for event in run.events() if event["event"] == "rank_failed"]
    # Or what its peer meets at the other end of a socket: EOFError, ConnectionResetError.
    assert re.match(r"\w+Error at passing.py:\d+ \(<module>\), step \d+$", raised[0]), raised
    assert raised[1] == "OSError at passing.py:10 (<module>)"
    assert raised[2:] == ["ValueError at passing.py:19 (<module>), step 33"] * 2
    made = r"\| restarting all ranks in place, because the attempt had completed \d+ steps\n"
    assert re.search(made, done.stderr), done.stderr
    assert "| restarting all ranks in place, because an earlier attempt had made progress\n" in done.stderr
    twice = "the previous attempt failed with the same exception at the same line and step"
    assert f"| not restarted, because {twice}\n" in done.stderr
    assert (outcome_of(run) or {})["reason"].endswith(f"raised ValueError: bad sample. Not restarted, because {twice}")
    assert not any("suspect" in event for event in run.events())


def test_the_peers_of_a_failed_rank_are_told_to_exit_on_all_nodes(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm would wait KillWait for a rank in a collective, a process group its timeout."""
    monkeypatch.setattr(decide, "PEER_GRACE_S", 0.05)
    run.create()
    told: list[str] = []

    class Waiting(FakeRanks):
        """Rank 1 raises; rank 0 waits for it until the supervisor tells it to exit."""

        def start(self, command: list[str], environment: Mapping[str, str], logs: Path) -> None:
            self._server = environment[protocol.SUPERVISOR], environment[protocol.TOKEN]

        def wait(self) -> int:
            links = [ControlChannel.join(*self._server, rank, 1, timeout=10) for rank in (0, 1)]
            assert links[0] is not None and links[1] is not None
            links[1].send(Left("n2", End.EXCEPTION, error="ValueError: no", used_clusterddp=True))
            heard = threading.Event()
            links[0].listen(heard.set, lambda order: (told.append(order.why), heard.set()))  # type: ignore
            assert heard.wait(10)
            return 1

    attempt = Attempt(run, JOB, run.create_attempt(), Waiting(run, {"end": "died"}), FakeController(Cause.NONE))
    assert attempt.supervise() == 1
    assert told == ["rank 1 (n2) failed"]
    assert (outcome_of(run) or {})["reason"] == "rank 1 (n2) raised ValueError: no"


def test_a_rank_that_is_told_to_exit_reports_where_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The box shows that if the rank waited for one that takes a while to exit with code 0, and raised no error yet."""
    sent: list[Left] = []
    monkeypatch.setattr(rank, "USING_CLUSTERDDP", {__name__})
    process = RankProcess(cast(Any, SimpleNamespace(send=sent.append)))
    process.exit = cast(Any, Mock())
    listener = threading.Thread(target=lambda: rank.obey(process, Leave("rank 1 exited")))
    listener.start()
    listener.join()
    told = RankEnd.of(0, "n1", 9.0, sent[0])
    assert (told.end, (users_line(told.traceback) or "").partition(":")[0]) == (End.DISMISSED, Path(__file__).name)
    left = RankEnd(1, "n1", End.UNFINISHED, 1.0, error="exited with code 0 inside its training loop")
    lines = failure_text(RunDirectory(tmp_path), 0, FirstFailure(left, [told]), 9.0).split("\n")
    assert lines[lines.index("rank 0 waited for this rank:") + 1] == "Stack (most recent call last):"


def test_an_exception_is_recorded_and_shown_whether_or_not_the_scripts_hook_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, now in {"excepthook": sys.excepthook, "argv": sys.argv, "path": [*sys.path]}.items():
        monkeypatch.setattr(sys, name, now)  # to be restored
    script = tmp_path / "hooked.py"
    script.write_text("import sys\nsys.excepthook = lambda *_: 1 // 0\nraise ValueError('the data ends here')\n")
    end, code = rank.run_script(RankProcess(), [str(script)])
    assert (end.end, end.error, code) == (End.EXCEPTION, "ValueError: the data ends here", 1)
    shown = capsys.readouterr().err
    assert "ZeroDivisionError" in shown and "ValueError: the data ends here" in shown
