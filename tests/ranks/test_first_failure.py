"""Several ranks fail, and the box names the one that failed first, how, where and when: real processes, local runs."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from clusterddp import protocol
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm.cause import Cause
from clusterddp.supervisor import decide
from clusterddp.supervisor.attempt import Attempt
from clusterddp.worker import rank
from clusterddp.worker.control_channel import ControlChannel
from tests.ranks.test_local import submit
from tests.unit.test_attempt import JOB, FakeController, FakeRanks
from tests.waiting import story

HEAD = r"\| rank {rank} \(\S+\) {words}(?:.|\n)*?\n\| attempt 0{step}, \d\d\d\d-\d\d-\d\d \d\d:\d\d:\d\d\n"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


@pytest.mark.parametrize(
    ("how", "ranks", "gpus", "words", "body", "over"),
    [
        pytest.param(  # as the next one, and the memory of rank 0
            "raise", [0], 2, "raised ValueError: bad label on rank 0", "failing.py", True, marks=pytest.mark.product
        ),
        ("raise", [1, 2], 3, "raised ValueError: bad label on rank [12]", "failing.py", True),
        ("worker", [1], 2, r"raised ValueError: Caught ValueError in DataLoader worker process 0. ... ValueError: bad",
         "in __getitem__", True),
        ("memory", [0], 2, "ran out of memory: RuntimeError: ", "failing.py", True),
        ("segfault", [1], 2, r"killed by signal 11 \(SIGSEGV\)", "Fatal Python error: Segmentation fault", False),
        pytest.param(  # as the one above, and the stack of an abort is in test_stacks.py
            "abort", [0], 2, r"killed by signal 6 \(SIGABRT\)", "Fatal Python error: Aborted", False,
            marks=pytest.mark.product,
        ),
        ("leave", [1], 2, "exited with code 0 in its loop, after step 5 of 8", "rank 0 waited for it:", True),
        ("break", [1], 2, "exited early, with code 0 while other ranks waited for it", "rank 0 waited for it:", False),
        ("exit", [1], 2, r"exited by os._exit\(3\), no traceback", "log: ", False),
    ],
)  # fmt: skip
def test_the_box_names_the_true_first_failure(
    run: RunDirectory, how: str, ranks: list[int], gpus: int, words: str, body: str, over: bool
) -> None:
    """With host, step, time and stack; the other ranks are listed as consequences. The script's errors end the run.

    After the segmentation fault the ranks restart; the other failures that would restart them have one attempt here.
    """
    numbers = [str(rank) for rank in ranks]
    limit = [] if how == "segfault" else ["--set", "limits.attempts=1"]
    done = submit(
        run, "tests/scripts/failing.py", "--device", "cpu", "--gpus", str(gpus), "--set", "checkpoint.every=2 steps",
        *limit, "--", how, *numbers,
    )  # fmt: skip
    assert (done.returncode, run.attempts()) == ((1, [0]) if over or limit else (0, [0, 1])), story(run)
    assert ("limits.attempts" in (run.outcome() or {})["reason"]) == (not over and bool(limit))
    first = f"[{''.join(numbers)}]"
    # A worker reads ahead of the steps.
    step = r"( at step \d)?" if how == "worker" else " at step 5"
    head = re.search(HEAD.format(rank=first, words=words, step=step), done.stderr)
    assert head, done.stderr
    box = done.stderr[head.start() :].partition("\n+---")[0]
    assert body in box
    if how in ("segfault", "abort"):  # the stack of what crashed, and nothing of ours
        assert re.search(r'most recent call first\):\n(\|.*\n)*?.*failing.py", line \d+ in fail\n', box), box
    assert "clusterddp/worker/rank.py" not in box and "runpy" not in box, box
    others = re.findall(r"\| (also failed|as a result): rank (\d)", box)
    assert sorted(number for _, number in others) == [str(r) for r in range(gpus) if f"| rank {r} " not in head[0]], box
    besides = [number for kind, number in others if kind == "also failed"]
    assert set(besides) <= set(numbers), box


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
            links[1].send("left", host="n2", end="exception", error="ValueError: no", used_clusterddp=True)
            heard = threading.Event()
            links[0].listen(heard.set, lambda words: (told.append(words["leave"]), heard.set()))  # type: ignore[arg-type]
            assert heard.wait(10)
            return 1

    attempt = Attempt(run, JOB, run.create_attempt(), Waiting(run, {"end": "died"}), FakeController(Cause.NONE))
    assert attempt.supervise() == 1
    assert told == ["rank 1 (n2) failed"]
    assert (run.outcome() or {})["reason"] == "rank 1 (n2) raised ValueError: no"


def test_an_exception_is_recorded_and_shown_whether_or_not_the_scripts_hook_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    script = tmp_path / "hooked.py"
    script.write_text("import sys\nsys.excepthook = lambda *_: 1 // 0\nraise ValueError('the data ends here')\n")
    end, code = rank.run_script([str(script)])
    assert (end["end"], end["error"], code) == ("exception", "ValueError: the data ends here", 1)
    shown = capsys.readouterr().err
    assert "ZeroDivisionError" in shown and "ValueError: the data ends here" in shown
